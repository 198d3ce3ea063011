# SPDX-License-Identifier: Apache-2.0
"""The bytes that a launch is given: which tensor map each matrix has. The driver is a stand-in."""

from __future__ import annotations

import ctypes
import dataclasses
import types
from typing import Any
from unittest import mock

import numpy
import pytest
import torch

from moeos.compile import kernel_shape
from moeos.compile.kernel_shape import KernelShape
from moeos.config.config import GateUp, MoEConfig
from moeos.engines.base import CallTensors
from moeos.engines.cuda import arguments as cuda_arguments
from moeos.engines.cuda import driver as cuda_driver
from moeos.engines.cuda.arguments import _MAPS, ArgumentPacker, RankBuffers
from moeos.engines.shared_heap import HeapPlace
from tests.layers import config, draw_weights
from tests.weight_layouts import LAYOUTS, in_layout, with_layout

MAP_WORDS = 16
PLACE = HeapPlace(1280, 4096, 65536, 640)
RECORDS = torch.zeros(1, dtype=torch.uint8)
GATE = 2  # behind two maps of x
W1_NARROW = 11  # behind x, gate, eight maps of cells, and w1


class Driver(mock.MagicMock):
    """Makes tensor maps that say how many dimensions they have, how many columns a box has and
    bytes a row of the matrix, and where that lies.
    """

    def cuTensorMapEncodeTiled(
        self,
        kind: Any,
        dimensions: int,
        address: int,
        sizes: list[int],
        strides: list[int],
        box: list[int],
        *rest: Any,
    ) -> tuple[int, types.SimpleNamespace]:
        said = [dimensions, box[0], strides[0], address]
        return 0, types.SimpleNamespace(opaque=[*said, *[0] * (MAP_WORDS - len(said))])

    def cuuint64_t(self, value: int) -> int:
        return value

    cuuint32_t = cuuint64_t


def buffers_of(place: HeapPlace = PLACE) -> RankBuffers:
    """Of a workspace, too small to be used."""
    names = ("heap", "control", "tables", "between", "peers")
    return RankBuffers(place=place, **{name: torch.zeros(1, dtype=torch.uint8) for name in names})


def packer_of(
    cfg: MoEConfig, deadline: float = 1.0, buffers: RankBuffers | None = None
) -> ArgumentPacker:
    """A packer of one rank of one."""
    sizes = KernelShape(cfg=cfg, world_size=1, processors=4).sizes
    packer = ArgumentPacker(cfg, sizes, 0, deadline, 0, RECORDS)
    packer.use(buffers or buffers_of())
    return packer


def tensors_of(cfg: MoEConfig, x: torch.Tensor) -> CallTensors:
    """A call with weights of zeros."""
    return CallTensors(
        x=x,
        out=torch.empty_like(x),
        gate=torch.zeros(cfg.experts, cfg.hidden, dtype=cfg.gate_dtype),
        w1=torch.zeros(cfg.experts, cfg.w1_rows, cfg.hidden, dtype=cfg.dtype),
        w2=torch.zeros(cfg.experts, cfg.hidden, cfg.intermediate, dtype=cfg.dtype),
        b1=None,
        b2=None,
        selection_bias=None,
        topk_ids=None,
        topk_weights=None,
        tokens=None,
    )


def test_where_the_code_lies_stands_behind_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """RankArguments of kernels/sm90/block/arguments.cuh; until it is said there are zeros."""
    monkeypatch.setattr(cuda_driver, "load", Driver)
    packer = packer_of(config(dtype=torch.bfloat16, hidden=256, intermediate=128), deadline=3.0)
    words = packer.record.view("<u8")
    (behind,) = (words == 3_000_000_000).nonzero()[0] + 1
    assert words[behind : behind + 2].tolist() == [0, 0]
    packer.pack_code(0x7F00_1234_5680, 304_640)
    assert words[behind : behind + 2].tolist() == [0x7F00_1234_5680, 304_640]


def test_a_call_says_last_whether_it_leaves_its_partial_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As RankArguments of kernels/sm90/block/arguments.cuh have it, behind x_scale_is_exponent."""
    monkeypatch.setattr(cuda_driver, "load", Driver)
    cfg = config(dtype=torch.bfloat16, hidden=256, intermediate=128)
    packer = packer_of(cfg, deadline=3.0)
    call = tensors_of(cfg, torch.zeros(3, cfg.hidden, dtype=cfg.dtype))
    packer.pack(call, 77)
    before = packer.record.view("<u4").copy()
    packer.pack(call, 77, leaves_partials=True)
    (changed,) = (packer.record.view("<u4") != before).nonzero()
    assert len(changed) == 1
    assert packer.record.view("<u4")[changed[0] - 2 : changed[0] + 1].tolist() == [77, 0, 1]
    packer.pack(call, 77)
    assert (packer.record.view("<u4") == before).all()


def test_a_layer_whose_workspace_has_grown_is_told_where_its_rows_lie_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_driver, "load", Driver)
    cfg = config(dtype=torch.bfloat16, hidden=256, intermediate=128)
    packer = packer_of(cfg, deadline=3.0)
    packer.pack(tensors_of(cfg, torch.zeros(3, cfg.hidden, dtype=cfg.dtype)), 77)
    before = packer.record.copy()
    larger = buffers_of(HeapPlace(2560, 8192, 131072, 1280))
    packer.use(larger)
    words = packer.record.view("<u8")
    (end,) = (words == 3_000_000_000).nonzero()[0]
    heap, control, tables = words[end - 12 : end - 9]
    assert heap == larger.heap.data_ptr()
    assert control == larger.control.data_ptr()
    assert tables == larger.tables.data_ptr()
    assert words[end - 6 : end - 2].tolist() == [2560, 8192, 131072, 1280]
    changed = (packer.record != before).nonzero()[0]
    maps = len(_MAPS) * MAP_WORDS * 8
    assert all(at < maps or (end - 12) * 8 <= at < end * 8 for at in changed)


@pytest.mark.parametrize("router_dtype", [None, torch.float32])
def test_a_box_of_the_router_has_rows_of_128_bytes(
    router_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_driver, "load", Driver)
    cfg = config(dtype=torch.bfloat16, hidden=256, intermediate=128, router_dtype=router_dtype)
    packer = packer_of(cfg)
    packer.pack(tensors_of(cfg, torch.zeros(3, cfg.hidden, dtype=cfg.dtype)), 0)
    maps = packer.record.view("<u8")[: 3 * MAP_WORDS].reshape(3, MAP_WORDS)
    size = 2 if router_dtype is None else 4
    assert maps[GATE, :3].tolist() == [2, 128 // size, 256 * size]
    assert maps[0, :3].tolist() == [2, 64, 512]


def test_a_map_of_weights_is_not_taken_for_that_of_tokens_in_their_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_driver, "load", Driver)
    cfg = config(dtype=torch.bfloat16, hidden=256, intermediate=128, experts=2, top_k=2)
    packer = packer_of(cfg)
    w1 = torch.zeros(cfg.experts, 2 * cfg.intermediate, cfg.hidden, dtype=cfg.dtype)
    x = w1.view(-1, cfg.hidden)  # as if these had the memory of weights that are gone
    packer.pack(tensors_of(cfg, x)._replace(w1=w1), 0)
    dimensions = packer.record.view("<u8")[::MAP_WORDS]
    assert dimensions[0] == 2
    assert dimensions[W1_NARROW] == 5


CODED = config(
    dtype=torch.bfloat16,
    hidden=256,
    intermediate=128,
    weight_format="fp8_block128",
    activation_format="fp8_group128",
)


def coded_tensors_of(x: torch.Tensor) -> CallTensors:
    """A call of a layer whose rows and weights are codes."""
    call = tensors_of(CODED, x)
    codes = {name: getattr(call, name).to(torch.float8_e4m3fn) for name in ("w1", "w2")}
    scales = {
        "w1_scale": torch.ones(CODED.experts, 2, 2),
        "w2_scale": torch.ones(CODED.experts, 2, 1),
    }
    return call._replace(**codes, **scales, out=torch.empty(x.shape, dtype=CODED.dtype))


def test_maps_of_codes_have_128_of_them_and_step_over_the_scales_behind_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_driver, "load", Driver)
    packer = packer_of(CODED)
    packer.pack(coded_tensors_of(torch.zeros(3, 256, dtype=CODED.dtype)), 0)
    maps = packer.record.view("<u8")[: len(_MAPS) * MAP_WORDS].reshape(-1, MAP_WORDS)
    of_rows = {name: maps[_MAPS.index(name), :3].tolist() for name in ("cells", "intermediate")}
    # A row's codes, and an fp32 scale for 128 or for 64 of them, to a multiple of 16 bytes.
    assert of_rows == {"cells": [2, 128, 256 + 16], "intermediate": [2, 128, 128 + 16]}
    of_weights = {name: maps[_MAPS.index(name), :3].tolist() for name in ("w1", "w1_narrow", "w2")}
    assert of_weights == {"w1": [5, 128, 256], "w1_narrow": [5, 128, 256], "w2": [5, 128, 128]}
    assert maps[_MAPS.index("x"), :3].tolist() == [2, 64, 512]


def test_shared_experts_of_codes_are_loaded_as_those_that_are_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_driver, "load", Driver)
    width = 128
    cfg = dataclasses.replace(
        CODED,
        shared_experts=1,
        shared_intermediate=width,
        shared_weight_format=CODED.weight_format,
    )
    shared = {
        "shared_w1": torch.zeros(1, 2 * width, cfg.hidden, dtype=torch.float8_e4m3fn),
        "shared_w2": torch.zeros(1, cfg.hidden, width, dtype=torch.float8_e4m3fn),
        "shared_w1_scale": torch.ones(1, 2, 2),
        "shared_w2_scale": torch.ones(1, 2, 1),
    }
    packer = packer_of(cfg)
    packer.pack(coded_tensors_of(torch.zeros(3, 256, dtype=cfg.dtype))._replace(**shared), 0)
    words = packer.record.view("<u8")
    maps = words[: len(_MAPS) * MAP_WORDS].reshape(-1, MAP_WORDS)
    names = ("shared_w1", "shared_w1_narrow", "shared_w2")
    of_weights = {name: maps[_MAPS.index(name), :3].tolist() for name in names}
    # Half of the bytes of a box of numbers, as they are decoded where they land.
    assert of_weights == {
        "shared_w1": [5, 64, 256],
        "shared_w1_narrow": [5, 64, 256],
        "shared_w2": [5, 64, 128],
    }
    behind = cuda_arguments._CALL_AT // 8
    scales = [shared["shared_w1_scale"].data_ptr(), shared["shared_w2_scale"].data_ptr(), 0, 0]
    assert words[behind - 4 : behind].tolist() == scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_codes_of_x_bring_their_scales_and_leave_no_map_to_numbers_in_their_place(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_driver, "load", Driver)
    memory = torch.zeros(3, 512, dtype=torch.uint8)
    numbers = memory.view(torch.bfloat16)
    codes = memory.view(torch.float8_e4m3fn).view(6, 256)[:3]
    assert numbers.data_ptr() == codes.data_ptr()
    scale = torch.ones(3, 2, dtype=dtype)
    buffers = buffers_of()
    packer, fresh = packer_of(CODED, buffers=buffers), packer_of(CODED, buffers=buffers)
    call = coded_tensors_of(codes)._replace(x_scale=scale)
    plain = call._replace(x=numbers, x_scale=None)
    fresh.pack(plain, 0)
    packer.pack(call, 0)
    assert scale.data_ptr() in packer.record.view("<u8")
    assert packer.record.view("<u4")[cuda_arguments._CALL_AT // 4 + 17] == (dtype == torch.uint8)
    packer.pack(plain, 0)
    assert (packer.record == fresh.record).all()


def test_a_rank_without_experts_has_maps_that_the_driver_makes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel asks for every map, and the driver makes none of an address of 0 or of no rows."""

    class Strict(Driver):
        def cuTensorMapEncodeTiled(self, *arguments: Any) -> tuple[int, types.SimpleNamespace]:
            _, _, address, sizes, *_ = arguments
            assert address != 0
            assert all(size > 0 for size in sizes)
            return super().cuTensorMapEncodeTiled(*arguments)

    monkeypatch.setattr(cuda_driver, "load", Strict)
    cfg = config(dtype=torch.bfloat16, hidden=256, intermediate=128, routing="caller")
    buffers = buffers_of()
    packer = packer_of(cfg, buffers=buffers)
    call = tensors_of(cfg, torch.zeros(3, cfg.hidden, dtype=cfg.dtype))
    packer.pack(call._replace(w1=call.w1[:0], w2=call.w2[:0], gate=None), 0)
    anywhere = buffers.between.data_ptr()
    maps = packer.record.view("<u8")[: len(_MAPS) * MAP_WORDS].reshape(-1, MAP_WORDS)
    of_weights = [maps[_MAPS.index(name), 3] for name in ("w1", "w1_narrow", "w2", "gate")]
    assert of_weights == [anywhere] * 4


def test_a_call_that_is_refused_leaves_the_record_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or the next call of the old tensors would find their addresses, and others' maps."""
    monkeypatch.setattr(cuda_driver, "load", Driver)
    cfg = config(dtype=torch.bfloat16, hidden=256, intermediate=128)
    packer = packer_of(cfg)
    call = tensors_of(cfg, torch.zeros(3, cfg.hidden, dtype=cfg.dtype))
    packer.pack(call, 0)
    before = packer.record.copy()
    room = torch.zeros(call.w2.numel() + 1, dtype=cfg.dtype)
    odd = room[1:].view(call.w2.shape)
    with pytest.raises(ValueError, match=r"w2 lies at address .* pass a copy, w2\.clone\(\)"):
        packer.pack(tensors_of(cfg, call.x)._replace(w2=odd), 0)
    assert (packer.record == before).all()
    packer.pack(call, 0)
    assert (packer.record == before).all()


def test_a_record_does_not_depend_on_the_calls_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """More sets of parameters and places of tokens than are kept, in an order that comes back."""
    monkeypatch.setattr(cuda_driver, "load", Driver)
    monkeypatch.setattr(cuda_arguments, "MAX_KEPT", 3)
    cfg = config(dtype=torch.bfloat16, hidden=256, intermediate=128)
    buffers = buffers_of()
    packer = packer_of(cfg, buffers=buffers)
    layers = [tensors_of(cfg, torch.zeros(3, cfg.hidden, dtype=cfg.dtype)) for _ in range(5)]
    places = [torch.zeros(rows, cfg.hidden, dtype=cfg.dtype) for rows in (3, 1, 7, 3, 2)]
    for number in range(60):
        x = places[number * 7 % 5]
        call = layers[number * number % 5]._replace(x=x, out=torch.empty_like(x))
        packer.pack(call, 0)
        fresh = packer_of(cfg, buffers=buffers)
        fresh.pack(call, 0)
        assert (packer.record == fresh.record).all()


@pytest.mark.parametrize("name", ["x", "topk_ids", "topk_weights", "tokens", "w1", "w2", "gate"])
def test_memory_that_is_gone_is_refused_by_name_though_shapes_stay(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Shape and strides of such a tensor are those of the calls before, so nothing else looks."""
    monkeypatch.setattr(cuda_driver, "load", Driver)
    cfg = config(dtype=torch.bfloat16, hidden=256, intermediate=128)
    packer = packer_of(cfg)
    call = tensors_of(cfg, torch.zeros(3, cfg.hidden, dtype=cfg.dtype))._replace(
        topk_ids=torch.zeros(3, cfg.top_k, dtype=torch.int64),
        topk_weights=torch.zeros(3, cfg.top_k),
        tokens=torch.ones(1, dtype=torch.int32),
    )
    packer.pack(call, 77)
    for left in (0, 1):
        gone = getattr(call, name).clone()
        gone.untyped_storage().resize_(left)
        said = "gate.weight" if name == "gate" else name
        for _ in range(2):
            with pytest.raises(ValueError, match=f"^{said} reaches to byte"):
                packer.pack(call._replace(**{name: gone}), 77)
    packer.pack(call, 77)


class Reader(Driver):
    """Makes tensor maps that name a place in `made`, where all says what they were made of."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.made: list[tuple[Any, ...]] = []

    def cuTensorMapEncodeTiled(self, *arguments: Any) -> tuple[int, types.SimpleNamespace]:
        self.made.append(arguments)
        return 0, types.SimpleNamespace(opaque=[len(self.made) - 1] * MAP_WORDS)

    def box(self, number: int, *first: int) -> numpy.ndarray[Any, Any]:
        """What TMA would load of a map: rows as they lie in the stage; `first`: coordinates."""
        _, dimensions, address, sizes, strides, box, *_ = self.made[number]
        assert len(first) == dimensions
        size = sizes[0] * 2 + sum(
            (n - 1) * stride for n, stride in zip(sizes[1:], strides, strict=True)
        )
        memory = (ctypes.c_uint16 * (size // 2)).from_address(address)
        whole = numpy.lib.stride_tricks.as_strided(
            numpy.ctypeslib.as_array(memory), sizes[::-1], [*strides[::-1], 2]
        )
        loaded = numpy.zeros(box[::-1], numpy.uint16)
        there = whole[tuple(slice(f, f + n) for f, n in zip(first[::-1], box[::-1], strict=True))]
        loaded[tuple(slice(n) for n in there.shape)] = there
        return loaded.reshape(-1, box[0])


@pytest.mark.parametrize(("gate_up", "transposed"), LAYOUTS)
@pytest.mark.parametrize(("hidden", "intermediate"), [(328, 168), (104, 72)])
def test_maps_of_a_callers_layout_load_what_those_of_the_plain_layout_do(
    gate_up: GateUp,
    transposed: bool,
    hidden: int,
    intermediate: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = config(hidden=hidden, intermediate=intermediate, dtype=torch.bfloat16, bias=True)
    weights = with_layout(draw_weights(plain), gate_up, transposed)
    driver = Reader()
    monkeypatch.setattr(cuda_driver, "load", lambda: driver)
    packer = packer_of(weights.cfg)
    call = tensors_of(plain, torch.zeros(3, hidden, dtype=plain.dtype))
    moved = {name: part for name, part in in_layout(weights).items() if part is not None}
    packer.pack(call._replace(**moved), 0)
    numbers = packer.record.view("<u8")[: len(_MAPS) * MAP_WORDS : MAP_WORDS].tolist()
    gates, ups = weights.w1.view(torch.int16).chunk(2, 1)
    of_w2 = weights.w2.view(torch.int16)

    def box(name: str, expert: int, first: int, depth: int, rows: int) -> numpy.ndarray[Any, Any]:
        """64 elements of some rows from `first` on, of an expert's in a map of so many each."""
        number = numbers[_MAPS.index(name)]
        if transposed:
            return driver.box(number, first, depth, expert)
        return driver.box(number, depth, 0, (expert * rows + first) // 8, 0, 0)

    def expected(matrix: torch.Tensor, first: int, depth: int, rows: int) -> torch.Tensor:
        part = torch.zeros(rows, 64, dtype=torch.int16)
        found = matrix[first : first + rows, depth : depth + 64]
        part[: found.shape[0], : found.shape[1]] = found
        if transposed:
            return part.mT
        # In 32 rows, row 8b + 2a + i lies at 8a + 2b + i.
        return part.unflatten(0, (-1, 4, 4, 2)).transpose(1, 2).flatten(0, 3)

    def assert_loads(box: numpy.ndarray[Any, Any], right: torch.Tensor) -> None:
        assert (box.view("i2") == right.numpy()).all()

    rows = 64 if transposed else kernel_shape.weight_box_rows(plain)
    narrow = 64 if transposed else min(rows, kernel_shape.narrow_product0_columns(plain))
    last = intermediate // 64 * 64
    for expert, first, depth in ((0, 8, 64), (plain.experts - 1, 0, hidden // 64 * 64)):
        right = expected(of_w2[expert], first, last, rows)
        assert_loads(box("w2", expert, first, last, hidden), right)
        for name, height in (("w1", rows), ("w1_narrow", narrow)):
            if transposed and gate_up != "separate":  # gates and ups have one map
                halves = (gates[expert], ups[expert])
                whole = torch.cat(halves)
                if gate_up == "interleaved":
                    whole = torch.stack(halves, 1).flatten(0, 1)
                right = expected(whole, 2 * first, depth, height)
                assert_loads(box(name, expert, 2 * first, depth, 0), right)
            else:  # ups have the maps that other layers' shared experts have
                for its, part in ((name, gates), (f"shared_{name}", ups)):
                    right = expected(part[expert], first, depth, height)
                    assert_loads(box(its, expert, first, depth, intermediate), right)
