# SPDX-License-Identifier: Apache-2.0
"""What goes along when experts move, and what keeps them from moving."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import moeos
from moeos import ConfigMismatch, MoELayer, Placement, World
from moeos.layer import moving
from moeos.world import virtual
from tests.host.partition.test_placement import CFG, COPIES, MOVED, SHUFFLED, UNEVEN, WEIGHTS, right
from tests.layers import config, draw_call
from tests.process_group import ranks_of_torch

pytestmark = pytest.mark.usefixtures("poisoned_output")

TURNED = Placement([[2, 7, 0], [3, 6, 1], [8, 4, 5]])  # type: ignore[arg-type]
"""As many experts on each rank as SHUFFLED has."""
SWAPPED = Placement([[0, 1, 2], [8, 7, 6], [3, 4, 5]])  # type: ignore[arg-type]
ORDERED = Placement.chunk(9, 3)
OTHERWISE = Placement([UNEVEN.ranks[2][:4], [], (5, *UNEVEN.ranks[0])])
"""As many as UNEVEN has, of which rank 1 has none."""
NAMES = ("w1", "w2", "b1", "b2")


def of_experts(parameter: Tensor, placement: Placement, rank: int) -> Tensor:
    """A tensor as a parameter of which each expert's part tells its number."""
    own = torch.tensor(placement.ranks[rank], dtype=torch.float32) + 1.0
    each = (1,) * (parameter.dim() - 1)
    return own.to(parameter.dtype).view(-1, *each).expand(parameter.shape).contiguous()


def in_virtual_ranks(rank_main: Callable[[World], Any], ranks: int = 3) -> None:
    virtual.run(rank_main, ranks=ranks)


def in_processes(rank_main: Callable[[World], Any], ranks: int = 3) -> None:
    assert all(ranks_of_torch(lambda world: rank_main(world) is None, ranks))


# --- Gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [in_virtual_ranks, in_processes])
@pytest.mark.parametrize(("old", "new"), [(SHUFFLED, TURNED), (UNEVEN, OTHERWISE)])
def test_gradients_move_with_their_experts(
    run: Callable[..., None], old: Placement, new: Placement
) -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world, placement=old).requires_grad_()
        for name in NAMES:
            parameter: Any = getattr(layer, name)
            parameter.grad = of_experts(parameter, old, world.rank)
            parameter.main_grad = of_experts(parameter.float(), old, world.rank)
        kept = [(layer.w1.grad, layer.w2.main_grad)]
        addresses = [one.data_ptr() for pair in kept for one in pair]  # type: ignore[union-attr]
        layer.replace(new)
        for name in NAMES:
            parameter = getattr(layer, name)
            assert torch.equal(parameter.grad, of_experts(parameter, new, world.rank))
            assert torch.equal(parameter.main_grad, of_experts(parameter.float(), new, world.rank))
        assert addresses == [layer.w1.grad.data_ptr(), layer.w2.main_grad.data_ptr()]  # type: ignore[union-attr]
        right(layer)

    run(rank_main)


def test_a_step_after_experts_have_moved_is_that_before() -> None:
    def rank_main(world: World) -> None:
        outputs = []
        call = draw_call(CFG, 30, world.rank)
        for moves_first in (True, False):
            layer = WEIGHTS.layer(world, placement=SHUFFLED).requires_grad_()
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
            call(layer).square().sum().backward()
            if moves_first:
                layer.replace(TURNED)
            optimizer.step()
            outputs.append(call(layer).detach())
        assert torch.equal(*outputs)

    in_virtual_ranks(rank_main)


def test_a_gradient_that_some_ranks_have_is_refused_on_all_and_nothing_changes() -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world, placement=SHUFFLED).requires_grad_()
        if world.rank == 1:
            layer.w2.grad = torch.ones_like(layer.w2)
        sentence = "rank 1 has the gradient of w2, and rank 0 has none: all ranks with experts"
        with pytest.raises(ConfigMismatch, match=sentence):
            layer.replace(TURNED)
        assert layer.placement == SHUFFLED
        right(layer)

    in_virtual_ranks(rank_main)


@pytest.mark.parametrize(
    ("gradient", "error", "sentence"),
    [
        (lambda w1: torch.ones(1).expand(w1.shape), ValueError, "strides .* share memory"),
        (lambda w1: torch.ones_like(w1).to_sparse(), ValueError, "layout torch.sparse_coo"),
    ],
)
def test_a_gradient_that_cannot_be_written_is_refused_and_nothing_changes(
    gradient: Any, error: Any, sentence: str
) -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world, placement=SHUFFLED).requires_grad_()
        layer.w1.grad = gradient(layer.w1)
        with pytest.raises(error, match=f"the gradient of w1 has {sentence}"):
            layer.replace(TURNED)
        assert layer.placement == SHUFFLED
        layer.w1.grad = None
        right(layer)

    in_virtual_ranks(rank_main)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_backward_of_a_call_before_raises_and_one_after_is_right(mode: Any) -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world, placement=UNEVEN).requires_grad_()
        y = draw_call(CFG, 20, world.rank)(layer)
        with mode():
            layer.replace(OTHERWISE)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        right(layer)
        draw_call(CFG, 20, world.rank)(layer).sum().backward()

    in_virtual_ranks(rank_main)


def test_a_layer_that_was_made_in_inference_mode_has_its_experts_moved() -> None:
    def rank_main(world: World) -> None:
        with torch.inference_mode():
            layer = WEIGHTS.layer(world, placement=COPIES)
            state = layer.state_dict()
        layer.replace(MOVED)
        right(layer)
        for expert in COPIES.ranks[world.rank]:
            assert torch.equal(state[f"w1.{expert}"], WEIGHTS.w1[expert])

    in_virtual_ranks(rank_main)


# --- Optimizers ---------------------------------------------------------------------------------


class Factored(torch.optim.Optimizer):
    """Keeps a number for each row and column of each expert, and a list."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["rows"] = parameter.grad.sum(-1)
            state["more"] = {"list": [parameter.grad.clone(), 3]}
            state["step"] = torch.zeros(())


def trained(layer: MoELayer, optimizer: Any, calls: int, moves: Any = None, at: int = -1) -> None:
    """Some steps, before one of which experts move."""
    for number in range(calls):
        if number == at:
            layer.replace(moves, optimizers=[optimizer])
        optimizer.zero_grad()
        draw_call(CFG, 30, 10 * number + layer.world.rank)(layer).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("run", [in_virtual_ranks, in_processes])
def test_what_an_optimizer_keeps_moves_where_it_is_passed(run: Callable[..., None]) -> None:
    def rank_main(world: World) -> None:
        call, outputs = draw_call(CFG, 30, world.rank), []
        for at in (-1, 2):
            layer = WEIGHTS.layer(world, placement=SHUFFLED).requires_grad_()
            optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
            trained(layer, optimizer, 4, TURNED, at)
            with torch.no_grad():
                outputs.append(call(layer))
        assert torch.equal(*outputs)
        factored = Factored([layer.w1, layer.w2])
        for parameter in (layer.w1, layer.w2):
            parameter.grad = of_experts(parameter, TURNED, world.rank)
        factored.step()
        layer.replace(SHUFFLED, optimizers=[optimizer, factored])
        for parameter in (layer.w1, layer.w2):
            wanted, state = of_experts(parameter, SHUFFLED, world.rank), factored.state[parameter]
            assert torch.equal(state["rows"], wanted.sum(-1))
            assert torch.equal(state["more"]["list"][0], wanted)

    run(rank_main)


def test_an_optimizer_that_was_not_passed_takes_no_step() -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world, placement=SHUFFLED).requires_grad_()
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
        trained(layer, optimizer, 1)
        layer.replace(TURNED)
        sentence = r"AdamW keeps of w1 what is of other experts, since .* optimizers=\[optimizer\]"
        for _ in range(2):
            with pytest.raises(RuntimeError, match=sentence):
                optimizer.step()
        with pytest.raises((RuntimeError, ValueError), match=sentence):
            layer.replace(SHUFFLED, optimizers=[optimizer])
        layer.replace(SWAPPED)
        with pytest.raises(RuntimeError, match=sentence):
            optimizer.step()
        layer.replace(SHUFFLED)  # where they were
        optimizer.step()
        layer.replace(TURNED)
        optimizer.state.clear()
        optimizer.step()
        layer.replace(SHUFFLED, optimizers=(optimizer,))
        optimizer.step()
        plain = torch.optim.SGD(layer.parameters(), lr=0.1)
        plain.step()
        layer.replace(TURNED)
        plain.step()

    in_virtual_ranks(rank_main)


@pytest.mark.parametrize(
    ("passed", "error", "sentence"),
    [
        ("one", TypeError, r"optimizers is an optimizer; it must be a sequence: pass \[optimizer"),
        ([3], TypeError, "optimizers is a list of int; it must be a sequence of torch.optim"),
        (None, TypeError, "optimizers is a NoneType; it must be a sequence of torch.optim"),
        ("flat", ValueError, r"state of w1 in optimizers\[0\].rows has shape .*, and rank \d 3"),
        ("meta", ValueError, r"state of w1 in optimizers\[0\].rows is on meta, and its parameter"),
    ],
)
def test_what_cannot_move_as_an_optimizers_state_is_refused_by_name(
    passed: Any, error: Any, sentence: str
) -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world, placement=SHUFFLED).requires_grad_()
        optimizer = Factored([layer.w1])
        shape = [3, 5] if passed == "meta" else [layer.w1.numel()]
        device = "meta" if passed == "meta" else "cpu"
        optimizer.state[layer.w1]["rows"] = torch.zeros(shape, device=device)
        given = {"one": optimizer, "flat": [optimizer], "meta": [optimizer]}.get(
            str(passed), passed
        )
        with pytest.raises(error, match=sentence):
            layer.replace(TURNED, optimizers=given)
        assert layer.placement == SHUFFLED
        right(layer)

    in_virtual_ranks(rank_main)


# --- Layers of the same weights -----------------------------------------------------------------


def shares(layer: MoELayer, other: MoELayer, way: str, names: Any = NAMES) -> None:
    """Gives `other` the experts of `layer`: its parameters, or others in their memory."""
    with torch.no_grad():
        other.gate.weight.copy_(layer.gate.weight)
    for name in names:
        own = getattr(layer, name)
        setattr(
            other, name, own if way == "same" else nn.Parameter(own.detach(), own.requires_grad)
        )


@pytest.mark.parametrize("way", ["same", "memory"])
@pytest.mark.parametrize(("old", "new"), [(COPIES, MOVED), (UNEVEN, OTHERWISE)])
def test_layers_of_the_same_weights_move_together(way: str, old: Placement, new: Placement) -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world, placement=old)
        other = MoELayer(CFG, world, moeos.Workspace(world), placement=old)
        alone = WEIGHTS.layer(world, placement=old)
        shares(layer, other, way)
        for parameter in (layer.w1, other.w1):
            parameter.requires_grad_()
            parameter.grad = of_experts(parameter, old, world.rank)
        layer.replace(new)
        assert layer.placement == other.placement == new
        assert alone.placement == old
        layer.requires_grad_(False)
        other.requires_grad_(False)
        for one in (layer, other, alone):
            right(one)
        assert layer.w1.grad is not None
        assert other.w1.grad is not None
        assert torch.equal(layer.w1.grad, of_experts(layer.w1, new, world.rank))
        assert torch.equal(other.w1.grad, layer.w1.grad)
        other.replace(old)
        for one in (layer, other, alone):
            right(one)

    in_virtual_ranks(rank_main)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("unplaced", "was made without a placement"),
        ("elsewhere", r"has the placement \[\[2, 7, 0"),
        ("part", "has a w2 elsewhere"),
        ("closed", "is of a closed workspace"),
        ("config", "has another config"),
        ("pickled", "has no world"),
        ("world", r"is of World\(rank=0"),
    ],
)
def test_a_layer_that_cannot_move_keeps_those_of_its_weights(kind: str, why: str) -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world, placement=ORDERED)
        placement = {"unplaced": None, "elsewhere": TURNED}.get(kind, ORDERED)
        if kind == "config":
            other = MoELayer(config(experts=9, max_tokens=64), world, placement=ORDERED)
            shares(layer, other, "same", ("w1", "w2"))
        elif kind == "pickled":
            other = pickle.loads(pickle.dumps(layer))
            shares(layer, other, "same")
        elif kind == "world":
            other = MoELayer(CFG, world, placement=ORDERED)
            every = world.control.allgather(layer)
            if world.rank == 0:
                shares(every[1], other, "memory")
            world.control.barrier()
        else:
            workspace = moeos.Workspace(world)
            other = MoELayer(CFG, world, workspace, placement=placement)
            shares(layer, other, "same", ("w1",) if kind == "part" else NAMES)
            if kind == "closed":
                workspace.close()
        sentence = f"w1 of layer . lies in the memory of w1 of .*, which {why}.*copy.deepcopy"
        with pytest.raises(ValueError, match=sentence):
            layer.replace(SHUFFLED)
        assert layer.placement == ORDERED
        right(layer)

    in_virtual_ranks(rank_main)


def test_layers_that_share_weights_on_some_ranks_do_not_move() -> None:
    def rank_main(world: World) -> None:
        layer, other = (WEIGHTS.layer(world, placement=COPIES) for _ in range(2))
        if world.rank == 2:
            shares(layer, other, "same")
        sentence = "layer 1 has the weights of this layer on rank 2, and others on rank 0"
        with pytest.raises(ConfigMismatch, match=sentence):
            layer.replace(MOVED)
        for one in (layer, other):
            assert one.placement == COPIES
            right(one)

    in_virtual_ranks(rank_main)


# --- State dicts --------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_vars", [False, True])
def test_a_state_dict_from_before_stays_as_it_was(keep_vars: bool) -> None:
    def rank_main(world: World) -> None:
        model = nn.Sequential(WEIGHTS.layer(world, placement=COPIES)).requires_grad_(keep_vars)
        layer = model[0]
        assert isinstance(layer, MoELayer)
        state = model.state_dict(keep_vars=keep_vars)
        live = state[f"0.w1.{COPIES.ranks[world.rank][0]}"]
        assert live.data_ptr() == layer.w1.data_ptr()
        layer.replace(MOVED)
        for expert in COPIES.ranks[world.rank]:
            for name in NAMES:
                assert torch.equal(state[f"0.{name}.{expert}"], getattr(WEIGHTS, name)[expert])
        other = nn.Sequential(MoELayer(CFG, world, placement=COPIES))
        other.load_state_dict(state)
        right(other[0])  # type: ignore[arg-type]
        if set(COPIES.ranks[world.rank]) != set(MOVED.ranks[world.rank]):
            with pytest.raises(RuntimeError, match="Missing key"):
                model.load_state_dict(state)
        model.requires_grad_(False)
        right(layer)
        layer.replace(COPIES)
        model.load_state_dict(state)
        right(layer)

    in_virtual_ranks(rank_main)


def test_a_checkpoint_of_a_state_dict_from_before_is_right(tmp_path: Path) -> None:
    def rank_main(world: World) -> None:
        for number, (old, new) in enumerate([(ORDERED, SHUFFLED), (SHUFFLED, ORDERED)]):
            layer = WEIGHTS.layer(world, placement=old)
            state = layer.state_dict()
            layer.replace(new)
            dcp.save(state, checkpoint_id=tmp_path / str(number))
            for placement in (old, COPIES):
                other = MoELayer(CFG, world, placement=placement)
                wanted = other.state_dict()
                if (number == 0) == placement.in_order:
                    dcp.load(wanted, checkpoint_id=tmp_path / str(number))
                    right(other)
            right(layer)

    in_processes(rank_main)


def test_a_state_dict_of_experts_in_order_says_which_they_are() -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world, placement=ORDERED)
        state = layer.state_dict()
        for placement in (SHUFFLED, ORDERED):
            layer.replace(placement)
            every: dict[str, Tensor] = {}
            for its in world.control.allgather(state):
                every |= its
            for other in (None, ORDERED, TURNED):
                made = MoELayer(CFG, world, placement=other)
                made.load_state_dict(every)
                right(made)
        local = {"w1": layer.w1.detach(), "gate.weight": layer.gate.weight}
        layer.replace(SHUFFLED)
        own = list(SHUFFLED.ranks[world.rank])
        sentence = (
            rf"w1 has 3 experts and does not say which; .* out of order, \[{own[0]}, {own[1]}, "
            rf".*such as w1.{own[0]}"
        )
        with pytest.raises(RuntimeError, match=sentence):
            layer.load_state_dict(local, strict=False)
        right(layer)

    in_virtual_ranks(rank_main)


@pytest.mark.parametrize("run", [in_virtual_ranks, in_processes])
def test_the_state_dict_of_an_optimizer_from_before_stays_as_it_was(
    run: Callable[..., None],
) -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world, placement=ORDERED).requires_grad_()
        optimizer = Factored([layer.w1])
        layer.w1.grad = of_experts(layer.w1, ORDERED, world.rank)
        optimizer.step()
        before = optimizer.state_dict()
        layer.replace(TURNED, optimizers=[optimizer])
        wanted = of_experts(layer.w1, TURNED, world.rank).sum(-1)
        assert torch.equal(optimizer.state[layer.w1]["rows"], wanted)
        if run is in_virtual_ranks:
            with pytest.raises(ValueError, match="rows has 3 experts and does not say which"):
                optimizer.load_state_dict(before)
        else:
            optimizer.load_state_dict(before)
            assert torch.equal(optimizer.state[layer.w1]["rows"], wanted)
            assert torch.equal(optimizer.state[layer.w1]["more"]["list"][0].sum(-1), wanted)
        layer.replace(ORDERED, optimizers=[optimizer])
        optimizer.load_state_dict(before)
        wanted = of_experts(layer.w1, ORDERED, world.rank).sum(-1)
        assert torch.equal(optimizer.state[layer.w1]["rows"], wanted)

    run(rank_main)


def test_an_average_of_a_model_moves_as_the_model_does() -> None:
    def rank_main(world: World) -> None:
        model = nn.Sequential(WEIGHTS.layer(world, placement=SHUFFLED))
        average = AveragedModel(model)
        average.update_parameters(model)
        with torch.no_grad():
            model[0].w1.mul_(0.0)  # type: ignore[operator, union-attr]
        for one in (model[0], average.module[0]):
            one.replace(TURNED)  # type: ignore[operator]
        average.update_parameters(model)
        for local, expert in enumerate(TURNED.ranks[world.rank]):
            assert torch.equal(average.module[0].w1[local], WEIGHTS.w1[expert] / 2)

    in_virtual_ranks(rank_main)


# --- Experts in order, and what one rank lacks --------------------------------------------------


def test_experts_that_were_placed_in_order_move_there_and_back() -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world, placement=ORDERED)
        copied = copy.deepcopy(layer)
        read = pickle.loads(pickle.dumps(layer))
        read.bind(world)
        quantised = moeos.quantize(layer, "fp8_channel")
        wanted = draw_call(CFG, 20, world.rank)
        y = wanted(quantised)
        for one in (layer, copied, read, quantised):
            for placement in (SHUFFLED, ORDERED, TURNED):
                one.replace(placement)
                assert one.placement == placement
                if one is quantised:
                    assert torch.equal(wanted(one), y)
                else:
                    right(one)
            one.replace(ORDERED)
        again = copy.deepcopy(layer)  # of one that has moved
        again.replace(SHUFFLED)
        right(again)
        plain = moeos.quantize(WEIGHTS.layer(world), "fp8_channel")
        with pytest.raises(RuntimeError, match=r"made without a placement, .*chunk\(9, 3\)"):
            plain.replace(SHUFFLED)

    in_virtual_ranks(rank_main)


def test_all_ranks_place_experts_in_order_or_none_does() -> None:
    def rank_main(world: World) -> None:
        for kind in (MoELayer, moeos.Experts):
            sentence = f"rank 0 makes {kind.__name__} with a placement and rank 1 makes"
            with pytest.raises(ConfigMismatch, match=sentence):
                kind(CFG, world, placement=None if world.rank == 1 else ORDERED)

    in_virtual_ranks(rank_main)


@pytest.mark.parametrize("step", ["room", "fill"])
def test_what_one_rank_cannot_do_changes_nothing_on_any(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    really: Any = getattr(moving, step)

    def fails(*arguments: Any) -> Any:
        made = really(*arguments)
        if fails_here:
            raise RuntimeError("out of memory")
        return made

    fails_here = False
    monkeypatch.setattr(moving, step, fails)

    def rank_main(world: World) -> None:
        nonlocal fails_here  # of this process
        fails_here = world.rank == 1
        layer = WEIGHTS.layer(world, placement=COPIES)
        with pytest.raises((RuntimeError, ValueError), match="out of memory"):
            layer.replace(MOVED)
        assert layer.placement == COPIES
        right(layer)

    in_processes(rank_main)


def test_weights_without_values_do_not_move() -> None:
    def rank_main(world: World) -> None:
        with torch.device("meta"):
            layer = MoELayer(CFG, world, placement=COPIES)
        with pytest.raises(ValueError, match="w1 has no values, as it is on the meta device"):
            layer.replace(MOVED)
        assert layer.placement == COPIES

    in_virtual_ranks(rank_main)


def test_slices_of_experts_do_not_move() -> None:
    def rank_main(world: World) -> None:
        layer = MoELayer(CFG, world, parallel="tensor")
        with pytest.raises(
            RuntimeError, match="parallel is 'tensor': slices of experts lie in order"
        ):
            layer.replace(SHUFFLED)

    in_virtual_ranks(rank_main)


def test_a_layer_of_a_closed_workspace_does_not_move() -> None:
    def rank_main(world: World) -> None:
        workspace = moeos.Workspace(world)
        layer = WEIGHTS.layer(world, workspace, placement=COPIES)
        workspace.close()
        with pytest.raises(RuntimeError, match="workspace of this layer is closed"):
            layer.replace(MOVED)
        for local, expert in enumerate(COPIES.ranks[world.rank]):
            assert torch.equal(layer.w1[local], WEIGHTS.w1[expert])

    in_virtual_ranks(rank_main)
