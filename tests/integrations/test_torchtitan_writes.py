# SPDX-License-Identifier: Apache-2.0
"""However a program writes to the parameters of torchtitan's experts, a call reads what they hold.

The right value is the output of a module that was made with the same numbers, bit for bit, and for
optimizers float64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moeos.config import reference
from tests.integrations.stand_ins import Tensors, on_ranks
from tests.integrations.test_torchtitan import HIDDEN, INTERMEDIATE, TOP_K, built, call, config
from tests.integrations.ways_to_write import NEEDS, WAYS, numbers_of


def new_numbers(tensors: Tensors) -> dict[str, Tensor]:
    gate, up = tensors.w1.split(INTERMEDIATE, dim=1)
    return {"w1_EFD": gate.clone(), "w2_EDF": tensors.w2.clone(), "w3_EFD": up.clone()}


@pytest.mark.parametrize(
    ("compiled", "one_module"),
    [(False, False), (True, True), pytest.param(True, False, marks=pytest.mark.nightly)],
    ids=["eager", "compiled once", "compiled for each way"],
)
def test_a_call_reads_what_was_written_before_between_and_after_calls(
    compiled: bool, one_module: bool, tmp_path: Path
) -> None:
    """Each way is tried before the first call, after a call, and after a backward; with one module
    for all ways another way's calls come before.
    """

    def live(rank: int) -> list[tuple[str, int]]:
        sets = [Tensors(config(), seed) for seed in range(4)]
        x, (ids, scores) = sets[0].draw(9, HIDDEN), sets[0].routing(9)

        def output(module: Any) -> Tensor:
            with torch.no_grad():
                return call(module, x, ids, scores)

        wrong, experts = [], None
        for name in [way for way in WAYS if way not in NEEDS]:  # for what torchtitan has
            if experts is None or not one_module:
                torch._dynamo.reset()
                experts = built(sets[0], {})
                run = torch.compile(experts, backend="aot_eager") if compiled else experts
            inner = experts.inner_experts
            before = output(built(sets[0], {}))
            for time, tensors in enumerate(sets[1:]):
                WAYS[name](inner, new_numbers(tensors), tmp_path / name / str(time))
                fresh = built(tensors, {})
                fresh.inner_experts.load_state_dict(numbers_of(inner))
                expected = output(fresh)
                assert not torch.equal(expected, before), "the way wrote nothing"
                if not torch.equal(output(run), expected):
                    wrong.append((name, time))
                before = expected
                if time == 1:
                    inner.requires_grad_(True)
                    call(experts if one_module else run, x, ids, scores).sum().backward()
                    inner.zero_grad()
        return wrong

    assert on_ranks(live, 1, seconds=600) == [[]]


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0, "foreach": False}),
    "AdamW, foreach": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0, "foreach": True}),
    "AdamW, fused": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0, "fused": True}),
    "SGD, fused": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9, "fused": True}),
}


def test_steps_of_every_optimizer_are_those_of_float64() -> None:
    def live(rank: int) -> dict[str, float]:
        tensors = Tensors(config())
        batches = [(tensors.draw(24, HIDDEN), *tensors.routing(24)) for _ in range(3)]

        def steps(kind: Any, options: dict[str, Any]) -> dict[str, Tensor]:
            experts = built(tensors, {})
            optimizer = kind(experts.inner_experts.parameters(), **options)
            for x, ids, scores in batches:
                optimizer.zero_grad()
                call(experts, x, ids, scores).square().sum().backward()
                optimizer.step()
            return dict(experts.inner_experts.named_parameters())

        def right(kind: Any, options: dict[str, Any]) -> dict[str, Tensor]:
            stock = {name: nn.Parameter(one.double()) for name, one in new_numbers(tensors).items()}
            options = options | {"fused": False, "foreach": False}
            optimizer = kind(stock.values(), **options)
            for x, ids, scores in batches:
                optimizer.zero_grad()
                gate, up = (
                    torch.einsum("sd,efd->sef", x.double(), stock[name])
                    for name in ("w1_EFD", "w3_EFD")
                )
                between = nn.functional.silu(gate) * up
                of_all = torch.einsum("sef,edf->sed", between, stock["w2_EDF"])
                picked = of_all.gather(1, ids.long()[..., None].expand(-1, TOP_K, HIDDEN))
                (scores.double()[..., None] * picked).sum(1).square().sum().backward()
                optimizer.step()
            return stock

        errors = {}
        for name, how in OPTIMIZERS.items():
            found, expected, before = steps(*how), right(*how), new_numbers(tensors)
            for key, one in expected.items():
                moved = found[key].double() - before[key]
                errors[f"{name}: {key}"] = reference.relative_error(moved, one - before[key])
        return errors

    [errors] = on_ranks(live, 1)
    assert max(errors.values()) < 1e-4, errors


def test_calls_change_nothing_of_a_parameter_but_its_gradient() -> None:
    def live(rank: int) -> bool:
        tensors = Tensors(config())
        experts = built(tensors, {})
        inner = experts.inner_experts

        def state() -> list[Any]:
            return [
                (
                    *(name, id(one), type(one), one.shape, one.stride(), one.storage_offset()),
                    *(one.data_ptr(), one.untyped_storage().nbytes(), one._version),
                    *(sorted(vars(one)), one._backward_hooks, one._post_accumulate_grad_hooks),
                    *(one.requires_grad, one.is_leaf),
                    one.detach().clone().numpy().tobytes(),
                )
                for name, one in inner.named_parameters()
            ]

        before, modules = state(), (sorted(vars(inner)), sorted(inner._buffers))
        x, (ids, scores) = tensors.draw(9, HIDDEN), tensors.routing(9)
        for _ in range(3):
            call(experts, x, ids, scores).sum().backward()
        for weight in inner.parameters():
            assert weight.grad is not None
            assert weight.grad.stride() == weight.stride()
        assert (sorted(vars(inner)), sorted(inner._buffers)) == modules
        return state() == before

    assert on_ranks(live, 1) == [True]
