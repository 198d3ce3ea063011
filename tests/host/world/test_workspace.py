# SPDX-License-Identifier: Apache-2.0
"""Layers that share a workspace: what they compute, what they keep apart, and what they cost."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

import moeos
from moeos import MoEConfig, MoELayer, World
from moeos.engines.twin.workspace import TwinWorkspace
from moeos.world import virtual
from moeos.world.world import TwinOptions

OPTIONS = TwinOptions(processors=2)
SHAPES = (
    MoEConfig(hidden=64, intermediate=48, experts=8, top_k=2, max_tokens=24, dtype=torch.float32),
    MoEConfig(hidden=96, intermediate=32, experts=4, top_k=1, max_tokens=70, dtype=torch.bfloat16),
    MoEConfig(hidden=32, intermediate=80, experts=16, top_k=4, max_tokens=9, dtype=torch.float32),
)


def _rows(cfg: MoEConfig, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    rows = int(torch.randint(cfg.max_tokens + 1, (), generator=generator))
    return torch.randn(rows, cfg.hidden, generator=generator).to(cfg.dtype)


def _interleaved(layers: int, steps: int, ranks: int, **options: object) -> None:
    """Layers of three shapes, called in a drawn order, against each alone in a workspace."""

    def compare(world: World) -> None:
        torch.manual_seed(3)
        made = [MoELayer(SHAPES[i % len(SHAPES)], world) for i in range(layers)]
        alone = [MoELayer(layer.cfg, world, workspace=moeos.Workspace(world)) for layer in made]
        for layer, other in zip(made, alone, strict=True):
            other.load_state_dict(layer.state_dict())
        order = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for step in range(steps):
                index = int(torch.randint(layers, (), generator=order))
                x = _rows(made[index].cfg, world.rank, step)
                y = made[index](x)
                assert torch.equal(y, alone[index](x)), (step, index)
                assert made[index].stats()["tokens"] == len(x)

    virtual.run(compare, ranks=ranks, twin=OPTIONS, **options)


def test_48_layers_of_three_shapes_interleaved_for_200_steps_compute_what_each_does_alone() -> None:
    _interleaved(48, 200, 2)


def test_a_reset_amid_the_making_of_a_workspace_has_those_that_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As that of a signal's handler or of another thread, wherever it comes.
    made = TwinWorkspace.__init__

    def init(self: TwinWorkspace, world: World, number: int) -> None:
        if number < 2:
            world.reset()
        made(self, world, number)

    monkeypatch.setattr(TwinWorkspace, "__init__", init)

    def run(world: World) -> None:
        first, second = (moeos.Workspace(world) for _ in range(2))
        assert (first.shared.number, second.shared.number) == (0, 1)  # type: ignore[attr-defined]
        layer = MoELayer(SHAPES[0], world, workspace=second)
        world.reset()
        assert layer(_rows(SHAPES[0], 0, 0)).isfinite().all()

    virtual.run(run, ranks=1)


def test_layers_beside_remote_peers_do_so_too() -> None:
    _interleaved(6, 40, 2, ranks_per_node=1)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
def test_layers_of_more_ranks_do_so_for_many_steps(ranks_per_node: int) -> None:
    _interleaved(48, 1000, 4, ranks_per_node=ranks_per_node)


@pytest.mark.parametrize("ranks_per_node", [None, 2, 1])
def test_ranks_that_call_different_layers_get_an_error_that_names_both_on_all_ranks(
    ranks_per_node: int | None,
) -> None:
    def call(world: World) -> str:
        first, second = (MoELayer(SHAPES[i], world) for i in range(2))
        world.layer_names[1] = "model.layers.1.mlp"
        layer = second if world.rank == 1 else first
        with torch.no_grad(), pytest.raises(RuntimeError) as raised:
            layer(_rows(layer.cfg, world.rank, 0))
        # The other layers of the workspace fail with it, until it is reset.
        other = first if world.rank == 1 else second
        with torch.no_grad(), pytest.raises(RuntimeError, match="the ranks call different layers"):
            other(_rows(other.cfg, world.rank, 0))
        world.control.barrier()
        world.reset()
        with torch.no_grad():
            first(_rows(first.cfg, world.rank, 0))
        return str(raised.value)

    for said in virtual.run(call, ranks=4, twin=OPTIONS, ranks_per_node=ranks_per_node):
        assert "layer 0" in said
        assert "layer 1 (model.layers.1.mlp)" in said


def test_layers_of_one_shape_are_told_apart_as_well() -> None:
    def call(world: World) -> None:
        layers = [MoELayer(SHAPES[0], world) for _ in range(2)]
        with (
            torch.no_grad(),
            pytest.raises(RuntimeError, match=r"layer 0.*layer 1|layer 1.*layer 0"),
        ):
            layers[world.rank](_rows(SHAPES[0], world.rank, 0))

    virtual.run(call, ranks=2, twin=OPTIONS)


def test_ranks_that_cut_a_call_into_different_numbers_of_pieces_are_told_so() -> None:
    def call(world: World) -> None:
        layer = MoELayer(SHAPES[0], world)
        x = _rows(SHAPES[0], world.rank, 0)
        with (
            torch.no_grad(),
            pytest.raises(RuntimeError, match=r"different numbers of pieces: .* in [23] pieces"),
        ):
            layer(x, pieces=2 + world.rank)
        world.control.barrier()
        layer.reset()
        with torch.no_grad():
            assert torch.equal(layer(x, pieces=3), layer(x))

    virtual.run(call, ranks=2, twin=OPTIONS)


def test_a_failed_call_fails_the_other_layers_of_its_workspace_by_its_name() -> None:
    def call(world: World) -> None:
        first, second = (MoELayer(SHAPES[i], world) for i in range(2))
        apart = MoELayer(SHAPES[0], world, workspace=moeos.Workspace(world))
        x = _rows(SHAPES[0], world.rank, 1)
        with torch.no_grad():
            with pytest.raises(moeos.NumericalError):
                first(torch.full((2, 64), torch.nan))
            with pytest.raises(moeos.NumericalError, match="a call of layer 0, in the same"):
                second(_rows(SHAPES[1], world.rank, 1))
            apart(x)
            first.reset()
            second(_rows(SHAPES[1], world.rank, 1))

    virtual.run(call, ranks=2, twin=OPTIONS)


def test_a_workspace_grows_between_calls_and_layers_go_on() -> None:
    def call(world: World) -> None:
        torch.manual_seed(1)
        with torch.no_grad():
            layer = MoELayer(SHAPES[2], world)
            x = _rows(SHAPES[2], world.rank, 7)
            before = layer(x)
            heap = world.memory()["heap"]
            larger = MoELayer(SHAPES[1], world)
            assert world.memory()["heap"] > heap
            assert torch.equal(layer(x), before)
            larger(_rows(SHAPES[1], world.rank, 7))
            assert torch.equal(layer(x), before)

    virtual.run(call, ranks=2, twin=OPTIONS)


def test_48_layers_take_the_memory_of_one() -> None:
    cfg = MoEConfig(
        hidden=512, intermediate=256, experts=8, top_k=2, max_tokens=2048, dtype=torch.float32
    )

    def call(world: World) -> None:
        kept = [MoELayer(cfg, world, init=False)]
        one = sum(world.memory().values())
        kept += [MoELayer(cfg, world, init=False) for _ in range(47)]
        assert one < sum(world.memory().values()) <= 1.05 * one

    virtual.run(call, ranks=2, twin=OPTIONS)


def test_a_deleted_layer_gives_its_records_back_and_the_workspace_goes_on() -> None:
    def call(world: World) -> None:
        first = MoELayer(SHAPES[0], world)
        before = world.memory()["records"]
        second = MoELayer(SHAPES[0], world)
        assert world.memory()["records"] == 2 * before
        del second
        gc.collect()
        assert world.memory()["records"] == before
        with torch.no_grad():
            first(_rows(SHAPES[0], world.rank, 0))

    virtual.run(call, ranks=1, twin=OPTIONS)


def test_a_workspace_goes_with_the_last_of_its_layers() -> None:
    def call(world: World) -> None:
        layer = MoELayer(SHAPES[0], world, workspace=moeos.Workspace(world))
        with torch.no_grad():
            layer(_rows(SHAPES[0], world.rank, 0))
        assert world.memory()["heap"] > 0
        del layer
        gc.collect()
        assert world.memory() == {}
        world.reset()

    virtual.run(call, ranks=2, twin=OPTIONS)


def test_a_layer_whose_workspace_is_closed_says_so() -> None:
    def call(world: World) -> None:
        space = moeos.Workspace(world)
        layer = MoELayer(SHAPES[0], world, workspace=space)
        space.close()
        with (
            torch.no_grad(),
            pytest.raises(RuntimeError, match="workspace of this layer is closed"),
        ):
            layer(_rows(SHAPES[0], world.rank, 0))
        assert set(world.memory()) == {"records"}
        with torch.no_grad():
            MoELayer(SHAPES[0], world)(_rows(SHAPES[0], world.rank, 0))

    virtual.run(call, ranks=2, twin=OPTIONS)


def test_ranks_that_make_a_layer_in_different_workspaces_are_told_so() -> None:
    def call(world: World) -> None:
        spaces = [moeos.Workspace(world) for _ in range(2)]
        with pytest.raises(moeos.ConfigMismatch, match=r"rank 0 makes it in workspace 0 .* 1"):
            MoELayer(SHAPES[0], world, workspace=spaces[world.rank])

    virtual.run(call, ranks=2, twin=OPTIONS)


def test_a_layer_is_not_made_in_a_closed_workspace_or_in_that_of_another_world() -> None:
    def call(world: World) -> None:
        space = moeos.Workspace(world)
        space.shared.closed = world.rank == 1
        with pytest.raises(RuntimeError, match="workspace 0 is closed on rank 1"):
            MoELayer(SHAPES[0], world, workspace=space)
        with moeos.init("twin") as other, pytest.raises(ValueError, match="of another world"):
            MoELayer(SHAPES[0], other, workspace=space)

    virtual.run(call, ranks=2, twin=OPTIONS)


def test_a_wrong_workspace_on_one_rank_is_refused_before_anything_is_sent() -> None:
    def call(world: World) -> None:
        with moeos.init("twin") as other:
            wrong = moeos.Workspace(other)
            if world.rank == 1:
                for kind in (MoELayer, moeos.Experts):
                    with pytest.raises(ValueError, match=r"another world.*size=1.*pass moe"):
                        kind(SHAPES[0], world, workspace=wrong)
                    with pytest.raises(TypeError, match=r"is a int; it must be a moeos\.W"):
                        kind(SHAPES[0], world, workspace=5)  # type: ignore[arg-type]
        layer = MoELayer(SHAPES[0], world)
        assert layer.experts is not None
        assert layer.experts.engine.number == 0
        with torch.no_grad():
            layer(_rows(SHAPES[0], world.rank, 0))

    virtual.run(call, ranks=2, twin=OPTIONS)


def test_a_rank_that_makes_a_layer_while_others_reset_is_told_so_and_all_go_on() -> None:
    def call(world: World) -> str:
        layer = MoELayer(SHAPES[0], world)
        apart = (world.reset, lambda: MoELayer(SHAPES[1], world))
        with pytest.raises(moeos.ConfigMismatch) as caught:
            apart[world.rank]()
        world.reset()
        with torch.no_grad():
            layer(_rows(SHAPES[0], world.rank, 0))
        return str(caught.value)

    said = virtual.run(call, ranks=2, twin=OPTIONS)
    assert said[0] == said[1]
    assert "rank 0 came to reset, and rank 1 to the comparison of the ranks' configs" in said[0]


def test_threads_may_call_different_layers_of_a_workspace() -> None:
    def call(world: World) -> None:
        layers = [MoELayer(SHAPES[i % 3], world) for i in range(4)]
        wrong: list[BaseException] = []

        def work(layer: MoELayer) -> None:
            try:
                with torch.no_grad():
                    x = _rows(layer.cfg, 0, 3)
                    first = layer(x)
                    for _ in range(10):
                        assert torch.equal(layer(x), first)
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(layer,)) for layer in layers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    virtual.run(call, ranks=1, twin=OPTIONS)


def test_an_abort_amid_a_growth_in_the_same_thread_waits_for_nobody() -> None:
    """As a signal's handler begins one."""
    with moeos.init(backend="twin") as world:
        workspace = moeos.Workspace(world)
        layer = MoELayer(SHAPES[0], world, workspace).requires_grad_(False)
        assert isinstance(workspace.shared, TwinWorkspace)
        with workspace.shared._lock:
            world.abort("amid a growth")
        with pytest.raises(RuntimeError, match="gave up"):
            layer(_rows(layer.cfg, 0, 3))
