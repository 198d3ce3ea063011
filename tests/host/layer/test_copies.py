# SPDX-License-Identifier: Apache-2.0
"""Copies of a layer, pickles of it, and layers that are made before their weights are there."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from moeos import ConfigMismatch, MoELayer, World
from moeos.world import virtual
from tests.layers import assert_matches, config, draw_call, draw_weights

CFG = config(max_tokens=64, bias=True, selection_bias=True)
WEIGHTS = draw_weights(CFG)


def right(layer: MoELayer, weights: Any = WEIGHTS) -> None:
    """Asserts that the layer computes with `weights` on this rank. Collective."""
    call = draw_call(CFG, 20, layer.world.rank)
    assert_matches(weights, call, layer(call.x), f"rank {layer.world.rank}")


def stored(layer: MoELayer) -> bytes:
    file = io.BytesIO()
    torch.save(layer, file)
    return file.getvalue()


def read(stored: bytes) -> MoELayer:
    layer = torch.load(io.BytesIO(stored), weights_only=False)
    assert isinstance(layer, MoELayer)
    return layer


def test_a_deep_copy_shares_the_world_and_has_weights_of_its_own() -> None:
    other = draw_weights(CFG, 1)

    def rank_main(world: World) -> None:
        model = nn.ModuleDict({"norm": nn.LayerNorm(CFG.hidden), "mlp": WEIGHTS.layer(world)})
        first = model["mlp"]
        second = copy.deepcopy(model)["mlp"]
        assert isinstance(first, MoELayer)
        assert isinstance(second, MoELayer)
        assert second.world is world
        right(second)
        second.load_state_dict(other.layer(world).state_dict())
        right(first)
        right(second, other)
        del first, model
        right(second, other)

    virtual.run(rank_main, ranks=2)


def test_an_averaged_model_is_the_mean_of_the_weights() -> None:
    ends = [WEIGHTS, draw_weights(CFG, 1)]

    def rank_main(world: World) -> None:
        layer = ends[0].layer(world)
        averaged = AveragedModel(layer)
        for weights in ends:
            layer.load_state_dict(weights.layer(world).state_dict())
            averaged.update_parameters(layer)
        mean = averaged.module
        for name in ("w1", "w2", "b1", "b2"):
            parts = [getattr(weights.of_rank(world.rank, world.size), name) for weights in ends]
            assert torch.allclose(getattr(mean, name), torch.stack(parts).mean(0), atol=1e-6)
        call = draw_call(CFG, 20, world.rank)
        assert averaged(call.x).isfinite().all()
        right(layer, ends[1])

    virtual.run(rank_main, ranks=2)


@pytest.mark.parametrize(
    "through",
    [
        copy.deepcopy,
        lambda layer: AveragedModel(layer).module,
        lambda layer: pickle.loads(pickle.dumps(layer)).bind(layer.world),
        lambda layer: read(stored(layer)).bind(layer.world),
    ],
    ids=["deepcopy", "AveragedModel", "pickle", "torch.save"],
)
def test_a_copy_of_a_compiled_layer_runs_itself(through: Callable[[MoELayer], MoELayer]) -> None:
    other = draw_weights(CFG, 1)

    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        layer.compile(backend="eager")
        with torch.no_grad():
            right(layer)
            second = through(layer)
            second.load_state_dict(other.layer(world).state_dict())
            right(second, other)
            right(layer)

    virtual.run(rank_main, ranks=1)


def test_a_shallow_copy_is_the_same_layer() -> None:
    def rank_main(world: World) -> None:
        layer = MoELayer(CFG, world)
        same = copy.copy(layer)
        layer.load_state_dict(WEIGHTS.layer(world).state_dict())
        assert same.w1 is layer.w1
        del layer
        right(same)

    virtual.run(rank_main, ranks=2)


@pytest.mark.parametrize(
    "through",
    [
        lambda layer: read(stored(layer)),
        lambda layer: pickle.loads(pickle.dumps(layer)),
        lambda layer: copy.deepcopy(read(stored(layer))),
    ],
    ids=["torch.save", "pickle", "a copy of one that was read"],
)
def test_a_layer_from_a_pickle_runs_when_it_is_bound(
    through: Callable[[MoELayer], MoELayer],
) -> None:
    def rank_main(world: World) -> None:
        layer = through(WEIGHTS.layer(world))
        x = draw_call(CFG, 20, 0).x
        for use in (lambda: layer(x), layer.stats, layer.trace, layer.check, layer.reset):
            with pytest.raises(RuntimeError, match=r"must call layer\.bind\(world\) first"):
                use()
        assert "without a world" in repr(layer)
        assert layer.bind(world) is layer
        right(layer)
        with pytest.raises(RuntimeError, match="the layer has a world"):
            layer.bind(world)
        right(layer)

    virtual.run(rank_main, ranks=2)


def test_a_layer_of_another_rank_or_world_or_config_is_not_bound() -> None:
    pickles = virtual.run(lambda world: stored(WEIGHTS.layer(world)), ranks=2)
    small = virtual.run(lambda world: stored(MoELayer(config(), world)), ranks=2)

    def bind(choose: Callable[[int], bytes]) -> Callable[[World], tuple[type, str]]:
        def rank_main(world: World) -> tuple[type, str]:
            layer = read(choose(world.rank))
            with pytest.raises(ValueError, match="rank") as error:
                layer.bind(world)
            return error.type, str(error.value)

        return rank_main

    swapped = virtual.run(bind(lambda rank: pickles[1 - rank]), ranks=2)
    one_twice = virtual.run(bind(lambda rank: pickles[0]), ranks=2)
    too_many = virtual.run(bind(lambda rank: pickles[rank % 2]), ranks=4)
    mixed = virtual.run(bind(lambda rank: (pickles, small)[rank][rank]), ranks=2)
    for outcomes in (swapped, one_twice, too_many, mixed):
        assert len(set(outcomes)) == 1  # the same error on every rank
    assert "rank 0 of 2 has the layer that rank 1 of 2 pickled" in swapped[0][1]
    assert "rank 1 of 2 has the layer that rank 0 of 2 pickled" in one_twice[0][1]
    assert "rank 0 of 4 has the layer that rank 0 of 2 pickled" in too_many[0][1]
    assert "load a state dict" in too_many[0][1]
    assert mixed[0][0] is ConfigMismatch

    def remedy(world: World) -> None:
        whole = {
            name: torch.cat([getattr(read(p), name) for p in pickles])
            for name in ("w1", "w2", "b1", "b2")
        }
        gate = {k: v for k, v in read(pickles[0]).state_dict().items() if k.startswith("gate.")}
        layer = MoELayer(CFG, world)
        layer.load_state_dict(whole | gate)
        right(layer)

    virtual.run(remedy, ranks=4)


def _shapes(layer: MoELayer, answers: Any) -> None:
    answers.put((list(layer.w1.shape), repr(layer)))


def test_a_layer_goes_to_another_process_without_its_world() -> None:
    def rank_main(world: World) -> None:
        context = multiprocessing.get_context("spawn")
        answers = context.Queue()
        process = context.Process(target=_shapes, args=(WEIGHTS.layer(world), answers))
        process.start()
        shape, text = answers.get(timeout=100)
        process.join(100)
        assert shape == [CFG.experts, CFG.w1_rows, CFG.hidden]
        assert "without a world" in text

    virtual.run(rank_main, ranks=1)


def test_a_world_is_shared_by_copies_of_what_holds_it_and_is_not_pickled() -> None:
    def rank_main(world: World) -> None:
        assert copy.deepcopy([world])[0] is world
        assert copy.copy(world) is world
        with pytest.raises(TypeError, match="the world of rank 0 cannot be pickled"):
            pickle.dumps(world)

    virtual.run(rank_main, ranks=1)


class MetaParameters(threading.local):
    """What accelerate's `init_empty_weights` does to modules that are made in it, on one thread."""

    def __init__(self) -> None:
        self._on = False

    def install(self, patch: pytest.MonkeyPatch) -> None:
        original = nn.Module.register_parameter

        def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            original(module, name, param)
            if param is not None and self._on:
                made = module._parameters[name]
                assert made is not None
                module._parameters[name] = nn.Parameter(made.to("meta"), made.requires_grad)

        patch.setattr(nn.Module, "register_parameter", register)

    def __enter__(self) -> None:
        self._on = True

    def __exit__(self, *_: object) -> None:
        self._on = False


@pytest.mark.parametrize("how", ["device", "init_empty_weights"])
@pytest.mark.parametrize("assign", [False, True], ids=["to_empty", "assign"])
def test_a_layer_is_made_without_weights_and_gets_them_later(
    how: str, assign: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocated: list[torch.Size] = []
    empty = torch.empty

    def counted(*size: int, **options: Any) -> Tensor:
        made: Tensor = empty(*size, **options)
        if not made.is_meta and made.dim() >= 2:
            allocated.append(made.shape)
        return made

    monkeypatch.setattr("moeos.layer.layer.torch.empty", counted)
    states = virtual.run(lambda world: WEIGHTS.layer(world).state_dict(), ranks=2)
    allocated.clear()
    empty_weights = MetaParameters()
    empty_weights.install(monkeypatch)

    def rank_main(world: World) -> None:
        with torch.device("meta") if how == "device" else empty_weights:
            layer = MoELayer(CFG, world)
        assert all(tensor.is_meta for tensor in layer.state_dict().values())
        assert not allocated
        x = draw_call(CFG, 20, world.rank).x
        with pytest.raises(ValueError, match=r"w1 has no values.*to_empty\(device='cpu'\)"):
            layer(x)
        if not assign:
            layer.to_empty(device="cpu")
        layer.load_state_dict(states[world.rank], assign=assign)
        right(layer)
        right(copy.deepcopy(layer))

    virtual.run(rank_main, ranks=2)


@pytest.mark.parametrize(
    "cast",
    [
        nn.Module.half,
        nn.Module.bfloat16,
        nn.Module.double,
        lambda model: model.to(torch.float16),
        lambda model: model.to("meta", torch.float16),
        lambda model: model.type(torch.float64),
    ],
    ids=["half", "bfloat16", "double", "to", "to another device, too", "type"],
)
def test_a_cast_to_another_dtype_raises_by_name_and_changes_nothing_of_the_layer(
    cast: Callable[[nn.Module], object],
) -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        with pytest.raises(TypeError, match=r"w1 would become torch\.\w+; .* in torch\.float32"):
            cast(nn.Sequential(nn.Linear(CFG.hidden, CFG.hidden), layer))
        right(layer)
        layer.float()
        layer.to(torch.float32)
        right(layer)

    virtual.run(rank_main, ranks=1)


def test_what_is_done_to_all_tensors_of_a_layer_does_not_break_it() -> None:
    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        layer.apply(lambda module: None)
        layer.to("cpu").float().requires_grad_(False).eval()
        layer.share_memory()
        right(layer)
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            layer.to(torch.float32)
            layer.load_state_dict(WEIGHTS.layer(world).state_dict())
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        right(layer)
        layer.to("meta")
        layer.to_empty(device="cpu").float()
        layer.load_state_dict(WEIGHTS.layer(world).state_dict())
        right(layer)

    virtual.run(rank_main, ranks=1)


def test_a_layer_that_accelerate_offloads_needs_to_be_preloaded_as_one_and_says_so() -> None:
    accelerate = pytest.importorskip("accelerate")
    call = draw_call(CFG, 20, 0)

    def rank_main(world: World) -> None:
        cpu = torch.device("cpu")
        model = accelerate.cpu_offload(nn.Sequential(WEIGHTS.layer(world)), cpu)
        with pytest.raises(ValueError, match=r"pass it preload_module_classes=\['MoELayer'\]"):
            model(call.x)
        model = accelerate.cpu_offload(
            nn.Sequential(WEIGHTS.layer(world)), cpu, preload_module_classes=["MoELayer"]
        )
        for _ in range(2):
            assert_matches(WEIGHTS, call, model(call.x))

    virtual.run(rank_main, ranks=1)
