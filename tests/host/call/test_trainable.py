# SPDX-License-Identifier: Apache-2.0
"""A layer trains as any module: its parameters require gradients unless they cannot have any."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from moeos import MoELayer, Placement, World, quantize
from moeos.world import virtual
from tests.layers import config

CFG = config(
    bias=True, router_bias=True, shared_experts=1, shared_intermediate=32, shared_gate=True
)
FORMATS = config(hidden=128, intermediate=128, weight_format="fp8_block128")


def rows(cfg: Any = CFG) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(40, cfg.hidden, generator=generator).to(cfg.dtype)


@pytest.mark.parametrize("parallel", ["expert", "tensor", "sharded_tokens"])
def test_a_step_of_an_optimizer_changes_every_parameter(parallel: Any) -> None:
    def rank_main(world: World) -> None:
        layer = MoELayer(CFG, world, parallel=parallel)
        before = {name: one.detach().clone() for name, one in layer.named_parameters()}
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        layer(rows()).square().sum().backward()
        optimizer.step()
        same = [name for name, one in layer.named_parameters() if torch.equal(one, before[name])]
        assert len(before) == 9
        assert not same

    virtual.run(rank_main, ranks=2)


def test_nothing_is_kept_where_no_gradient_is_wanted() -> None:
    def rank_main(world: World) -> tuple[bool, bool, bool]:
        layer = MoELayer(CFG, world)
        kept: list[torch.Tensor] = []

        def keep(one: torch.Tensor) -> torch.Tensor:
            kept.append(one)
            return one

        before = world.memory()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
            y = layer(rows())
        return y.requires_grad, bool(kept), world.memory() != before

    assert virtual.run(rank_main, ranks=2) == [(True, True, True)] * 2
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert virtual.run(rank_main, ranks=2) == [(False, False, False)] * 2


def test_virtual_ranks_are_in_the_modes_of_their_caller() -> None:
    def modes(world: World | None = None) -> tuple[bool, bool]:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    for mode in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        with mode:
            assert virtual.run(modes, ranks=2) == [modes()] * 2


def test_what_cannot_have_gradients_requires_none_and_says_why() -> None:
    copies = Placement([list(range(8)), list(range(8))])

    def rank_main(world: World) -> None:
        plain = MoELayer(config(hidden=128, intermediate=128), world)
        for layer, why in (
            (MoELayer(FORMATS, world), "with weight_format 'fp8_block128', whose codes"),
            (quantize(plain, "mxfp4"), "with weight_format 'mxfp4', whose codes and scales"),
            (MoELayer(CFG, world, placement=copies), "that has no backward where several ranks"),
        ):
            assert not any(one.requires_grad for one in layer.parameters())
            with pytest.raises(RuntimeError, match=rf"^requires_grad_\(True\) of a MoELayer {why}"):
                layer.requires_grad_()
            assert not layer(rows(layer.cfg)).requires_grad

    virtual.run(rank_main, ranks=2)


def test_a_frozen_layer_stays_frozen_in_copies_and_behind_a_state_dict() -> None:
    def rank_main(world: World) -> list[bool]:
        layer = MoELayer(CFG, world).requires_grad_(False)
        copied = copy.deepcopy(layer)
        copied.load_state_dict(MoELayer(CFG, world).state_dict(), assign=True)
        return [one.requires_grad for one in copied.parameters()]

    assert not any(virtual.run(rank_main, ranks=1)[0])
