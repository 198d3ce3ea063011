# SPDX-License-Identifier: Apache-2.0
"""Layers whose experts' weights are codes and scales: what they compute, and what becomes of their
tensors.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

import moeos
from moeos import Experts, MoEConfig, MoELayer, World
from moeos.call import call_checks
from moeos.cli import estimate
from moeos.cli.check import share_weights
from moeos.config.element_formats import NAMES, quantize_matrix
from moeos.engines.twin import engine as twin
from moeos.world import virtual
from tests.layers import (
    Call,
    Weights,
    assert_all_match,
    assert_matches,
    config,
    draw_call,
    draw_given_call,
    draw_weights,
)
from tests.nightly import in_turn, spread
from tests.process_group import ranks_of_torch

OF_EXPERTS = ("w1", "w2", *call_checks.SCALES)
OF_SHARED = tuple(f"shared_{name}" for name in OF_EXPERTS)
TENSORS = (*OF_EXPERTS, *OF_SHARED)
CALL = draw_call(config(), 9, 0)


def weights_in(name: str, **changes: Any) -> Weights:
    return draw_weights(config(weight_format=name, **changes))


ALL = {name: weights_in(name) for name in NAMES}
SHARED: dict[str, Any] = {"shared_experts": 2, "shared_intermediate": 160}


def shared_in(name: str, **changes: Any) -> Weights:
    return weights_in(name, **SHARED, shared_weight_format=name, **changes)


def same_tensors(layer: MoELayer, weights: Weights) -> bool:
    """Whether a layer has its part of the weights, bit for bit."""
    mine = weights.of_rank(*layer._place)
    for name in TENSORS:
        own, wanted = getattr(layer, name), getattr(mine, name)
        if (own is None) != (wanted is None):
            return False
        if own is not None and not (
            type(own) is nn.Parameter
            and own.dtype == wanted.dtype
            and not (own.requires_grad and layer.cfg.weight_format)
            and torch.equal(own.view(torch.uint8), wanted.contiguous().view(torch.uint8))
        ):
            return False
    return True


@pytest.mark.parametrize(
    ("name", "activation", "bias", "ranks"),
    spread(5, [*itertools.product(NAMES, ["swiglu", "relu2"], [False, True], [1, 4])]),
)
def test_every_token_has_what_the_reference_makes_of_the_numbers(
    name: str, activation: Any, bias: bool, ranks: int
) -> None:
    dtype = torch.float32 if bias else torch.bfloat16
    sizes = {"hidden": 160, "intermediate": 288, "max_tokens": 150}  # the last blocks are parts
    cfg = config(weight_format=name, activation=activation, bias=bias, dtype=dtype, **sizes)
    weights = draw_weights(cfg, seed=ranks)
    calls = [
        [draw_given_call(cfg, tokens, 7 * rank + tokens, unused=0.3) for tokens in (1, 33, 150)]
        for rank in range(ranks)
    ]

    def rank_main(world: World) -> list[Tensor]:
        layer = weights.layer(world)
        return [call(layer) for call in calls[world.rank]]

    assert_all_match(weights, calls, virtual.run(rank_main, ranks=ranks))


@pytest.mark.parametrize(
    ("name", "activation", "ranks"),
    spread(3, [*itertools.product(NAMES, ["swiglu", "relu2"], [1, 2])]),
)
def test_shared_experts_of_codes_are_those_of_the_numbers(
    name: str, activation: Any, ranks: int
) -> None:
    gate = activation == "swiglu"
    dtype = torch.float32 if gate else torch.bfloat16
    sizes = {"hidden": 160, "intermediate": 96, "max_tokens": 150}  # the last blocks are parts
    weights = shared_in(name, activation=activation, shared_gate=gate, dtype=dtype, **sizes)
    calls = [
        [draw_call(weights.cfg, tokens, 7 * rank + tokens) for tokens in (1, 33, 150)]
        for rank in range(ranks)
    ]

    def rank_main(world: World) -> list[Tensor]:
        layer = weights.layer(world)
        return [call(layer) for call in calls[world.rank]]

    assert_all_match(weights, calls, virtual.run(rank_main, ranks=ranks))


@pytest.mark.parametrize("name", ["fp8_block128", "fp8_channel", "fp8_tensor"])
def test_shared_experts_of_codes_multiply_numbers_where_others_multiply_codes(name: str) -> None:
    coded = {"hidden": 128, "intermediate": 64, "activation_format": "fp8_group128"}
    weights = shared_in(name, shared_gate=True, dtype=torch.bfloat16, **coded)
    call = draw_call(weights.cfg, 40, 3)
    [y] = virtual.run(lambda world: call(weights.layer(world)), ranks=1)
    assert_matches(weights, call, y)


def test_quantize_rounds_shared_experts_where_it_is_told_to() -> None:
    def rank_main(world: World) -> None:
        layer = MoELayer(config(**SHARED, shared_gate=True), world)
        for name in NAMES:
            left = moeos.quantize(layer, name)  # type: ignore[arg-type]
            assert torch.equal(left.shared_w2, layer.shared_w2)  # type: ignore[arg-type]
            assert left.shared_w2_scale is None
            made = moeos.quantize(layer, name, shared_weight_format=name)  # type: ignore[arg-type]
            assert torch.equal(made.shared_gate, layer.shared_gate)  # type: ignore[arg-type]
            for key, halves in (("shared_w1", 2), ("shared_w2", 1)):
                parts = quantize_matrix(getattr(layer, key), name, halves)
                for end, part in zip(("", "_scale", "_scale_2"), parts, strict=True):
                    own = getattr(made, key + end)
                    assert (own is None) == (part is None)
                    if part is not None:
                        assert torch.equal(own.view(torch.uint8), part.view(torch.uint8))
        with pytest.raises(ValueError, match=r"^shared_weight_format is 'mxfp4'; it must be None,"):
            moeos.quantize(layer, "nvfp4", shared_weight_format="mxfp4")

    virtual.run(rank_main, ranks=1)


def test_shared_experts_of_another_kind_are_named() -> None:
    def rank_main(world: World) -> None:
        coded = shared_in("fp8_channel").layer(world)
        plain = weights_in("fp8_channel", **SHARED).layer(world)
        with pytest.raises(
            RuntimeError,
            match=r"\bshared_w1_fp8_channel is of shared_weight_format 'fp8_channel', and the "
            r"layer of None: make it with MoEConfig\(shared_weight_format='fp8_channel'\)",
        ):
            plain.load_state_dict(coded.state_dict(), strict=False)
        with pytest.raises(
            RuntimeError,
            match=r"\bshared_w1 has dtype torch\.float32, numbers, and the layer has "
            r"shared_weight_format 'fp8_channel': make .* or set shared_weight_format=None",
        ):
            coded.load_state_dict(plain.state_dict(), strict=False)
        plain.shared_w1_scale = coded.shared_w1_scale
        message = r"^shared_w1_scale is given, and cfg\.shared_weight_format is None: leave it"
        with pytest.raises(ValueError, match=message):
            plain(CALL.x)
        coded.shared_w2_scale = None
        with pytest.raises(ValueError, match=r"^shared_w2_scale is missing; .*: \[2, 64\]"):
            coded(CALL.x)

    virtual.run(rank_main, ranks=1)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_draws_what_quantize_makes_of_the_numbers_that_it_would_draw(name: str) -> None:
    cfg = config(weight_format=name, bias=True, shared_experts=1, shared_intermediate=40)

    def rank_main(world: World) -> list[tuple[MoELayer, MoELayer]]:
        made = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            drawn = MoELayer(cfg, world)
            torch.manual_seed(seed)
            plain = MoELayer(dataclasses.replace(cfg, weight_format=None), world)
            with torch.no_grad():
                plain.b1.uniform_()  # type: ignore[union-attr]
            before = {key: value.clone() for key, value in plain.state_dict().items()}
            quantized = moeos.quantize(plain, name)  # type: ignore[arg-type]
            assert all(torch.equal(before[k], v) for k, v in plain.state_dict().items())
            assert torch.equal(quantized.b1, plain.b1)  # type: ignore[arg-type]
            assert torch.equal(quantized.shared_w1, plain.shared_w1)  # type: ignore[arg-type]
            assert torch.equal(quantized.gate.weight, plain.gate.weight)
            assert quantized.experts.workspace is plain.experts.workspace  # type: ignore[union-attr]
            made.append((drawn, quantized))
        return made

    by_ranks = {ranks: virtual.run(rank_main, ranks=ranks) for ranks in (1, 2)}
    for key in OF_EXPERTS:
        whole = {}
        for ranks, every in by_ranks.items():
            for rank in every:
                for drawn, quantized in rank:
                    if getattr(drawn, key) is not None and drawn.cfg.dtype == torch.float32:
                        one, other = (getattr(x, key).view(torch.uint8) for x in (drawn, quantized))
                        assert torch.equal(one, other), key
            if getattr(every[0][0][0], key) is not None:
                parts = [getattr(rank[0][0], key).view(torch.uint8) for rank in every]
                whole[ranks] = torch.cat(parts)
        assert not whole or torch.equal(whole[1], whole[2]), key


def test_quantize_names_what_it_does_not_take() -> None:
    def rank_main(world: World) -> None:
        layer = MoELayer(config(), world)
        with pytest.raises(TypeError, match=r"^layer is a Linear; it must be a MoELayer"):
            moeos.quantize(nn.Linear(2, 2), "mxfp4")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"^weight_format is 'int4'; it must be one of fp8_bl"):
            moeos.quantize(layer, "int4")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"^weight_format is None; it must be one of fp8_bloc"):
            moeos.quantize(layer, None)  # type: ignore[arg-type]
        with pytest.raises(
            ValueError, match=r"^the layer has weight_format 'nvfp4'; quantize take"
        ):
            moeos.quantize(moeos.quantize(layer, "nvfp4"), "mxfp4")
        narrow = MoELayer(config(hidden=72), world)
        with pytest.raises(ValueError, match=r"^hidden is 72; it must be a multiple of 16 with"):
            moeos.quantize(narrow, "fp8_tensor")
        with pytest.raises(RuntimeError, match=r"from a pickle and has no world: call layer\.bind"):
            moeos.quantize(pickle.loads(pickle.dumps(layer)), "mxfp4")
        with (
            torch.device("meta"),
            pytest.raises(ValueError, match=r"call it outside of torch\.devi"),
        ):
            moeos.quantize(layer, "mxfp4")
        gate = layer.gate
        del layer.gate
        with pytest.raises(ValueError, match=r"^gate\.weight is missing"):
            moeos.quantize(layer, "mxfp4")
        layer.gate = gate
        layer.w2 = nn.Parameter(layer.w2.detach().to("meta"), requires_grad=False)
        with pytest.raises(ValueError, match=r"^w2 has no values, as it is on the meta device"):
            moeos.quantize(layer, "mxfp4")

    virtual.run(rank_main, ranks=1)


def test_quantize_refuses_a_class_that_extends_a_layer_and_what_it_says_works() -> None:
    class Doubled(MoELayer):
        def forward(self, x: Tensor, **how: Any) -> Tensor:  # type: ignore[override]
            return 2 * super().forward(x, **how)

    def rank_main(world: World) -> None:
        cfg = config()
        layer, plain = Doubled(cfg, world), MoELayer(cfg, world)
        with pytest.raises(
            TypeError, match=r"^layer is a Doubled, which extends MoELayer"
        ) as error:
            moeos.quantize(layer, "mxfp4")
        assert "into a Doubled whose config has the format" in str(error.value)
        plain.load_state_dict(layer.state_dict())
        quantized = moeos.quantize(plain, "mxfp4")
        again = Doubled(quantized.cfg, world)
        again.load_state_dict(quantized.state_dict())
        x = draw_call(cfg, 20, 0).x
        assert torch.equal(again(x), 2 * quantized(x))

    virtual.run(rank_main, ranks=1)


@pytest.mark.parametrize("name", NAMES)
def test_experts_take_scales_with_each_call(name: str) -> None:
    weights = ALL[name]
    call = draw_given_call(weights.cfg, 40, 3)

    def rank_main(world: World) -> tuple[Tensor, Tensor]:
        mine = weights.of_rank(world.rank, world.size)
        experts = Experts(weights.cfg, world)
        for _ in range(2):  # the second is launched as the first
            y = experts(call.x, call.ids, call.weights, mine.w1, mine.w2, **mine.scales())
        return y, call(weights.layer(world))

    for y, of_layer in virtual.run(rank_main, ranks=2):
        assert torch.equal(y, of_layer)
        assert_matches(weights, call, y)


def test_a_compiled_layer_computes_the_same() -> None:
    weights = ALL["nvfp4"]

    torch._dynamo.reset()  # what tests before have compiled counts towards a limit

    def rank_main(world: World) -> Tensor:
        layer = weights.layer(world)
        y: Tensor = torch.compile(layer, backend="aot_eager", fullgraph=True)(CALL.x)
        return y

    [y] = virtual.run(rank_main, ranks=1)
    assert_matches(weights, CALL, y)


# --- state dicts, copies, casts -----------------------------------------------------------------


@pytest.mark.parametrize(("name", "shared"), in_turn(NAMES, [False, True]))
def test_codes_and_scales_pass_through_state_dicts_copies_and_pickles(
    name: str, shared: bool
) -> None:
    weights = shared_in(name) if shared else ALL[name]

    def rank_main(world: World) -> None:
        layer = weights.layer(world)
        assert same_tensors(layer, weights)
        names = [key for key in layer.state_dict() if "." not in key]
        assert names[:2] == [f"w1_{name}", f"w2_{name}"]
        other = MoELayer(weights.cfg, world)
        other.load_state_dict(layer.state_dict())
        assert same_tensors(other, weights)
        assert same_tensors(copy.copy(layer), weights)
        assert same_tensors(copy.deepcopy(layer), weights)
        back = pickle.loads(pickle.dumps(layer)).bind(world)
        assert same_tensors(back, weights)
        with torch.device("meta"):
            meta = MoELayer(weights.cfg, world)
        assert meta.w1.is_meta
        assert meta.w1.dtype == weights.w1.dtype
        meta.load_state_dict(layer.state_dict(), assign=True)
        assert same_tensors(meta, weights)
        assert_matches(weights, CALL, CALL(back))

    virtual.run(rank_main, ranks=2)


@pytest.mark.nightly
def test_a_checkpoint_of_a_model_is_read_by_another_number_of_ranks(tmp_path: Path) -> None:
    def save(world: World) -> bool:
        for name, weights in ALL.items():
            state = nn.ModuleDict({"mlp": weights.layer(world)}).state_dict()
            scale = state[f"mlp.w1_scale_{name}"]
            assert isinstance(scale, DTensor)
            assert scale.shape[0] == weights.cfg.experts
            dcp.save(state, checkpoint_id=tmp_path / name)
        return True

    def load(world: World) -> bool:
        for name, weights in ALL.items():
            model = nn.ModuleDict({"mlp": MoELayer(weights.cfg, world)})
            state = model.state_dict()
            dcp.load(state, checkpoint_id=tmp_path / name)
            model.load_state_dict(state)
            assert same_tensors(model["mlp"], weights)  # type: ignore[arg-type]
        return True

    assert all(ranks_of_torch(save, 4))
    assert all(ranks_of_torch(load, 2))


def test_dtensors_of_any_placement_are_gathered() -> None:
    def rank_main(world: World) -> bool:
        mesh = init_device_mesh("cpu", (world.size,))
        for kind, weights in ALL.items():
            layer = MoELayer(weights.cfg, world)
            state: dict[str, Any] = dict(layer.state_dict())
            for name in OF_EXPERTS:
                whole = getattr(weights, name)
                if whole is not None and whole.shape[1] % world.size == 0:
                    # By bytes, as gloo does not send 8-bit floats.
                    cut = distribute_tensor(whole.view(torch.uint8), mesh, [Shard(1)])
                    mine = cut.to_local().view(whole.dtype)
                    state[f"{name}_{kind}"] = DTensor.from_local(mine, mesh, [Shard(1)])
                elif whole is not None:
                    state[f"{name}_{kind}"] = whole
            layer.load_state_dict(state)
            assert same_tensors(layer, weights)
        return True

    assert all(ranks_of_torch(rank_main, 2))


def test_numbers_are_not_loaded_as_codes_nor_codes_as_numbers() -> None:
    def rank_main(world: World) -> None:
        plain = draw_weights(config())
        layer, coded = plain.layer(world), ALL["fp8_channel"].layer(world)
        with pytest.raises(
            RuntimeError,
            match=r"\bw1 has dtype torch\.float32, numbers, and the layer has weight_format "
            r"'fp8_channel': make a layer without a format, and moeos\.quantize it, or set weight_",
        ):
            coded.load_state_dict(layer.state_dict(), strict=False)
        with pytest.raises(
            RuntimeError,
            match=r"\bw1_fp8_channel is of weight_format 'fp8_channel', and the layer of None: "
            r"make it with MoEConfig\(weight_format='fp8_channel'\)",
        ):
            layer.load_state_dict(coded.state_dict(), strict=False)
        state = coded.state_dict()
        codes = {"w2": state["w2_fp8_channel"]}
        with pytest.raises(RuntimeError, match=r"w2 has dtype torch\.float8_e4m3fn; it must be to"):
            layer.load_state_dict(codes, strict=False)
        scale = "w2_scale_fp8_channel"
        for assign in (False, True):
            wrong = state | {scale: state[scale].bfloat16()}
            message = rf"{scale} has dtype torch\.bfloat16; it must be torch\.float32, scales of we"
            with pytest.raises(RuntimeError, match=message):
                coded.load_state_dict(wrong, assign=assign)
        del state[scale]
        with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "{scale}"'):
            coded.load_state_dict(state)
        assert same_tensors(coded, ALL["fp8_channel"])
        assert torch.equal(layer.w2, plain.w2)

    virtual.run(rank_main, ranks=1)


def test_codes_of_one_format_are_not_loaded_as_those_of_another() -> None:
    """Also where own tensors are there, too: a reader may have added them."""

    def rank_main(world: World) -> None:
        layers = {name: shared_in(name).layer(world) for name in NAMES}
        for name, layer in layers.items():
            for other in NAMES:
                state = layers[other].state_dict()
                for given in (state, {**layer.state_dict(), **state}) if other != name else ():
                    with pytest.raises(RuntimeError, match="is of weight_format") as raised:
                        layer.load_state_dict(given, strict=False)
                    said = str(raised.value)
                    assert (
                        f"w1_{other} is of weight_format {other!r}, and the layer of {name!r}: ma"
                        in said
                    )
                    assert (
                        f"shared_w1_{other} is of shared_weight_format {other!r}, and the" in said
                    )
            assert same_tensors(layer, shared_in(name))

    virtual.run(rank_main, ranks=1)


def test_codes_without_the_name_of_a_format_are_refused_until_they_have_one() -> None:
    def rank_main(world: World) -> None:
        for name, weights in ALL.items():
            layer = weights.layer(world)
            end = f"_{name}"
            old = {key.removesuffix(end): tensor for key, tensor in layer.state_dict().items()}
            other = MoELayer(weights.cfg, world)
            with pytest.raises(
                RuntimeError,
                match=r"\bw1 has dtype .* and a name without a format, .*; the layer has "
                rf"weight_format {name!r}: where they are of that, load w1 as w1_{name}, and the s",
            ):
                other.load_state_dict(old, strict=False)
            one_by_one = {f"{key}.{e}": part[e] for key, part in old.items() for e in range(8)}
            with pytest.raises(RuntimeError, match=rf"load w1\.0 as w1_{name}\.0, and the scales"):
                other.load_state_dict(one_by_one, strict=False)
            of_gate = ("gate.weight",)
            other.load_state_dict({k if k in of_gate else k + end: v for k, v in old.items()})
            assert same_tensors(other, weights)

    virtual.run(rank_main, ranks=1)


def test_readers_that_compare_names_alone_take_no_format_for_another(tmp_path: Path) -> None:
    """Without a format, too; each reads what is of its own."""
    every = {None: draw_weights(config(**SHARED)), **{name: shared_in(name) for name in NAMES}}

    def rank_main(world: World) -> bool:
        for name, weights in every.items():
            model = nn.ModuleDict({"mlp": weights.layer(world)})
            dcp.save(model.state_dict(), checkpoint_id=tmp_path / str(name))
        for name, weights in every.items():
            model = nn.ModuleDict({"mlp": MoELayer(weights.cfg, world)})
            for other in every:
                state = model.state_dict()
                if other == name:
                    dcp.load(state, checkpoint_id=tmp_path / str(other))
                    model.load_state_dict(state)
                    continue
                with pytest.raises(
                    CheckpointException, match=r"Missing key in checkpoint state_dict: mlp\."
                ):
                    dcp.load(state, checkpoint_id=tmp_path / str(other))
            assert same_tensors(model["mlp"], weights)  # type: ignore[arg-type]
        return True

    assert all(ranks_of_torch(rank_main, 2))


def test_functions_of_state_dicts_know_codes_by_the_names_of_their_parameters() -> None:
    def rank_main(world: World) -> bool:
        for name, weights in ALL.items():
            model = nn.ModuleDict({"mlp": weights.layer(world)})
            assert f"mlp.w1_{name}" in dict(model.named_parameters())
            state = get_model_state_dict(model)
            assert state.keys() == model.state_dict().keys()
            other = nn.ModuleDict({"mlp": MoELayer(weights.cfg, world)})
            set_model_state_dict(other, state)
            assert same_tensors(other["mlp"], weights)  # type: ignore[arg-type]
        return True

    assert all(ranks_of_torch(rank_main, 2))


def test_accelerate_gives_a_layer_codes_of_its_own_format_alone(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")

    def rank_main(world: World) -> None:
        def model(name: str) -> nn.ModuleDict:
            return nn.ModuleDict({"mlp": MoELayer(ALL[name].cfg, world)})

        for name in ("mxfp4", "int4_group32"):
            state = nn.ModuleDict({"mlp": ALL[name].layer(world)}).state_dict()
            file = tmp_path / f"{name}.safetensors"
            save_file(state, file, metadata={"format": "pt"})
            with accelerate.init_empty_weights():
                empty = model(name)
            accelerate.load_checkpoint_and_dispatch(empty, str(file), device_map={"": "cpu"})
            assert same_tensors(empty["mlp"], ALL[name])  # type: ignore[arg-type]
        with accelerate.init_empty_weights():
            empty = model("mxfp4")
        # No key of the file is one of the layer's, so its tensors stay without memory, and PyTorch
        # refuses to move them: nothing is taken for another format without a word.
        with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
            accelerate.load_checkpoint_and_dispatch(empty, str(file), device_map={"": "cpu"})
        with pytest.raises(
            RuntimeError, match=r"is of weight_format 'int4_group32', and the layer"
        ):
            accelerate.load_checkpoint_in_model(model("mxfp4"), str(file))

    virtual.run(rank_main, ranks=1)


def test_a_tensor_of_a_format_is_found_set_and_deleted_by_its_short_name() -> None:
    weights = ALL["nvfp4"]

    def rank_main(world: World) -> None:
        layer = weights.layer(world)
        assert layer.w1 is dict(layer.named_parameters())["w1_nvfp4"]
        assert layer.get_parameter("w1") is layer.get_parameter("w1_nvfp4") is layer.w1
        other = nn.Parameter(torch.zeros_like(layer.w1), requires_grad=False)
        layer.w1 = other
        assert layer.w1 is other is layer.w1_nvfp4
        assert "w1" not in layer.__dict__
        with pytest.raises(
            TypeError, match=r"cannot assign 'torch.FloatTensor' as parameter 'w1_nv"
        ):
            layer.w1 = torch.zeros(1)  # type: ignore[assignment]
        del layer.w1
        assert not hasattr(layer, "w1")
        with pytest.raises(ValueError, match=r"^w1 is missing"):
            layer(CALL.x)

    virtual.run(rank_main, ranks=1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("swap", [False, True], ids=["in place", "swapped"])
def test_casts_leave_codes_alone_or_are_refused(name: str, swap: bool) -> None:
    weights = shared_in(name, dtype=torch.bfloat16, bias=True)

    def rank_main(world: World) -> None:
        layer = weights.layer(world)
        for cast in (
            lambda: layer.to(torch.bfloat16),
            layer.bfloat16,
            lambda: layer.type(torch.bfloat16),
            lambda: layer.to("cpu"),
            layer.share_memory,
        ):
            cast()
            assert same_tensors(layer, weights)
        for other in (layer.half, layer.float, lambda: layer.to(torch.float64)):
            with pytest.raises(
                TypeError, match=r"^the layer would become .*; this MoELayer comput"
            ):
                other()
            assert same_tensors(layer, weights)
            assert layer.gate.weight.dtype == torch.bfloat16

    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        virtual.run(rank_main, ranks=1)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


# --- what is refused ----------------------------------------------------------------------------


def test_codes_and_scales_that_require_a_gradient_are_refused_by_name() -> None:
    weights = ALL["fp8_block128"]
    call = draw_given_call(weights.cfg, 5, 0)

    def rank_main(world: World) -> None:
        layer = weights.layer(world)
        with pytest.raises(
            RuntimeError, match=r"^requires_grad_\(True\) of a MoELayer with weight_f"
        ):
            layer.requires_grad_()
        layer.requires_grad_(False)
        layer.w2_scale.requires_grad_()  # type: ignore[union-attr]
        with (
            torch.no_grad(),
            pytest.raises(RuntimeError, match=r"^w2_scale requires a gradient, and"),
        ):
            layer(CALL.x)
        experts = Experts(weights.cfg, world)
        w1 = weights.w1.clone().requires_grad_()
        with pytest.raises(
            RuntimeError, match=r"^w1 requires a gradient, and the codes of weight_f"
        ):
            experts(call.x, call.ids, call.weights, w1, weights.w2, **weights.scales())

    virtual.run(rank_main, ranks=1)


Bad = tuple[str, Callable[[dict[str, Any]], Any], type[Exception], str]
BAD: dict[str, Bad] = {
    "e5m2": (
        "fp8_channel",
        lambda w: w.update(w1=w["w1"].float().to(torch.float8_e5m2)),
        TypeError,
        r"^w1 has dtype torch\.float8_e5m2; it must be torch\.float8_e4m3fn, codes of weight_form",
    ),
    "unquantised": (
        "mxfp4",
        lambda w: w.update(w2=torch.zeros(8, 64, 96)),
        TypeError,
        r"^w2 has dtype torch\.float32; it must be torch\.uint8, codes of weight_format 'mxfp4': "
        r"make a layer without a format, and moeos\.quantize it, or set weight_format=None",
    ),
    "scales of another block": (
        "fp8_block128",
        lambda w: w.update(w1_scale=torch.ones(8, 4, 2)),
        ValueError,
        r"^w1_scale has shape \[8, 4, 2\]; it must be \[8, 2, 1\]",
    ),
    "scales of another dtype": (
        "nvfp4",
        lambda w: w.update(w2_scale=w["w2_scale"].float()),
        TypeError,
        r"^w2_scale has dtype torch\.float32; it must be torch\.float8_e4m3fn, scales of weight_f",
    ),
    "no scale": (
        "int4_group32",
        lambda w: w.update(w1_scale=None),
        ValueError,
        r"^w1_scale is missing; .*: \[8, 192, 2\]",
    ),
    "no second scale": (
        "nvfp4",
        lambda w: w.update(w2_scale_2=None),
        ValueError,
        r"^w2_scale_2 is missing; .*: \[8, 1\]",
    ),
    "a second scale too many": (
        "mxfp4",
        lambda w: w.update(w1_scale_2=torch.ones(8, 2)),
        ValueError,
        r"^w1_scale_2 is given, and cfg\.weight_format is not 'nvfp4': leave it None, or make th",
    ),
    "scales that are not contiguous": (
        "mxfp4",
        lambda w: w.update(w1_scale=w["w1_scale"].mT.contiguous().mT),
        ValueError,
        r"^w1_scale has strides .*; it must be contiguous",
    ),
    "memory that is gone": (
        "fp8_tensor",
        lambda w: w["w2_scale"].untyped_storage().resize_(0),
        ValueError,
        r"^w2_scale reaches to byte",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_part_of_a_format_is_named(case: str) -> None:
    name, damage, error, message = BAD[case]
    weights = ALL[name]
    call = draw_given_call(weights.cfg, 5, 0)

    def rank_main(world: World) -> None:
        layer, experts = weights.layer(world), Experts(weights.cfg, world)
        given = {key: getattr(weights, key) for key in OF_EXPERTS}
        given = {key: None if part is None else part.clone() for key, part in given.items()}
        damage(given)
        with pytest.raises(error, match=message):
            experts(call.x, call.ids, call.weights, **given)
        for key, part in given.items():
            kept = None if part is None else nn.Parameter(part, requires_grad=False)
            setattr(layer, key, kept)
        with pytest.raises(error, match=message):
            layer(CALL.x)

    virtual.run(rank_main, ranks=1)


def test_codes_in_a_layer_without_a_format_are_named() -> None:
    def rank_main(world: World) -> None:
        layer = MoELayer(config(), world)
        layer.w1 = nn.Parameter(layer.w1.detach().to(torch.float8_e4m3fn), requires_grad=False)
        message = (
            r"^w1 has dtype .*; it must be torch\.float32, or this be made with MoEConfig\(wei"
        )
        with pytest.raises(TypeError, match=message):
            layer(CALL.x)

    virtual.run(rank_main, ranks=1)


def test_ranks_must_agree_on_the_format() -> None:
    def rank_main(world: World) -> None:
        name = "fp8_tensor" if world.rank == 0 else "mxfp4"
        with pytest.raises(moeos.ConfigMismatch, match=r"weight_format is 'fp8_tensor' on rank 0"):
            MoELayer(config(weight_format=name), world)

    virtual.run(rank_main, ranks=2)


def test_the_twin_has_no_float16_and_says_so_of_a_format_too() -> None:
    cfg = config(weight_format="mxfp4", dtype=torch.float16)
    with pytest.raises(ValueError, match=r"^dtype is torch\.float16; the twin computes with"):
        twin.TwinEngine.check_supported(cfg)


# --- what is planned and checked ----------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_counts_weights_as_they_are_stored(name: str) -> None:
    shared, weights = shared_in(name, shared_gate=True), weights_in(name, bias=True)
    cfg = weights.cfg

    def rank_main(world: World) -> int:
        return sum(parameter.nbytes for parameter in weights.layer(world).parameters())

    def of_shared(world: World) -> int:
        return sum(parameter.nbytes for parameter in shared.layer(world).parameters())

    assert virtual.run(of_shared, ranks=2) == [estimate.weight_bytes_per_rank(shared.cfg, 2)] * 2
    assert virtual.run(rank_main, ranks=2) == [estimate.weight_bytes_per_rank(cfg, 2)] * 2
    of_experts = sum(estimate.expert_bytes_by_name(cfg).values()) * cfg.experts
    assert estimate.work_of(cfg, 1, 128).weight_bytes == of_experts
    held = sum(
        part.nbytes
        for part in (weights.w1, weights.w2, weights.b1, weights.b2, *weights.scales().values())
        if part is not None
    )
    assert held == of_experts


def test_an_expert_of_codes_is_large_when_its_codes_are() -> None:
    cfg = MoEConfig(hidden=4096, intermediate=1536, experts=8, top_k=2, dtype=torch.bfloat16)
    coded = dataclasses.replace(cfg, weight_format="fp8_tensor")
    assert cfg.hidden * cfg.intermediate * 2 * 2 > 20 << 20 > cfg.hidden * cfg.intermediate * 2
    assert twin.sizes_of(cfg, 1, 1).large_experts == 1
    assert twin.sizes_of(coded, 1, 1).large_experts == 0


@pytest.mark.parametrize("name", NAMES)
def test_ranks_show_each_other_what_their_codes_mean(name: str) -> None:
    weights = ALL[name]

    def rank_main(world: World) -> None:
        every = share_weights(weights.layer(world))
        for matrix in ("w1", "w2"):
            numbers = weights.numbers(matrix)
            assert torch.allclose(every[matrix].double(), numbers, rtol=1e-6, atol=0)

    virtual.run(rank_main, ranks=2)


def test_the_tolerance_would_find_another_scale() -> None:
    for name, weights in ALL.items():
        assert weights.w1_scale is not None
        other = weights.w1_scale.view(torch.uint8).roll(1, 0).view(weights.w1_scale.dtype)
        wrong = dataclasses.replace(weights, w1_scale=other)
        call = Call(CALL.x)
        error = moeos.reference.relative_error(wrong.expected(call), weights.expected(call))
        assert error > 1e-3, name
