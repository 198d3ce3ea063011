# SPDX-License-Identifier: Apache-2.0
"""The bytes that a call of gradients is given on a GPU. The driver is a stand-in."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moeos.compile.kernel_shape import KernelShape
from moeos.engines.base import GradientTensors
from moeos.engines.cuda import driver as cuda_driver
from moeos.engines.cuda.arguments import RECORD_BYTES, ArgumentPacker
from moeos.engines.cuda.backward_arguments import (
    _MAPS,
    SAVING_RECORD_BYTES,
    GradientPacker,
    SavingPacker,
)
from moeos.engines.cuda.backward_kernels import (
    add_weights,
    routing_in,
    sizes_agree,
    with_own_weights,
)
from moeos.engines.pieces import gradient_pieces_of
from moeos.engines.saved_tensors import Share
from moeos.partition.slicing import Slicing
from tests.host.engines.cuda.test_arguments import MAP_WORDS, PLACE, RECORDS, Driver, buffers_of
from tests.host.engines.cuda.test_arguments import tensors_of as call_of
from tests.layers import config

CFG = config(dtype=torch.bfloat16, hidden=256, intermediate=160, experts=4, top_k=2)
BLOCKS = 7


def tensors_of(tokens: int, pieces: int = 1) -> GradientTensors:
    """A call of gradients of zeros, whose gradients of biases nobody wants."""
    rows = torch.zeros(tokens, CFG.hidden, dtype=CFG.dtype)
    choices = torch.zeros(tokens, CFG.slots)
    w1 = torch.zeros(CFG.experts, CFG.w1_rows, CFG.hidden, dtype=CFG.dtype)
    w2 = torch.zeros(CFG.experts, CFG.hidden, CFG.intermediate, dtype=CFG.dtype)
    sums = CFG.dtype if pieces == 1 else torch.float32
    return GradientTensors(
        x=rows,
        d_out=rows.clone(),
        topk_ids=choices.to(torch.int32),
        topk_weights=choices,
        w1=w1,
        b1=None,
        w2=w2,
        b2=None,
        tokens=tokens,
        pieces=pieces,
        saved=rows.new_empty((0, CFG.w1_rows)),
        d_x=rows.clone(),
        d_topk_weights=choices.clone(),
        d_w1=torch.zeros_like(w1, dtype=sums),
        d_b1=None,
        d_w2=torch.zeros_like(w2, dtype=sums),
        d_b2=None,
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_maps_and_addresses_lie_where_the_kernel_reads_them(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_driver, "load", Driver)
    shape = KernelShape(cfg=CFG, world_size=ranks, processors=4, gradients=True)
    sizes = shape.sizes
    of_rank = ArgumentPacker(CFG, sizes, 0, 1.0, 0, RECORDS)
    packer = GradientPacker(CFG, sizes, of_rank, BLOCKS)
    buffers = buffers_of()
    packer.use(buffers)
    tensors = tensors_of(3)._replace(d_x_added=torch.zeros(3, CFG.hidden), d_shared=torch.zeros(3))
    sent = torch.zeros(3, sizes.sent_bytes, dtype=torch.uint8)
    saved = torch.zeros(10, CFG.w1_rows, dtype=CFG.dtype)
    packer.pack(tensors, Share(saved[4:], 3), sent, 77)
    of_saved = packer.record[RECORD_BYTES:SAVING_RECORD_BYTES].view("<u8")
    assert of_saved.tolist() == [saved[4:].data_ptr(), 3, 0, 0, 0, 0, 0, 0]
    words = packer.record[SAVING_RECORD_BYTES:].view("<u8")
    maps = words[: len(_MAPS) * MAP_WORDS].reshape(-1, MAP_WORDS)[:, :4].tolist()
    cells = buffers.heap.data_ptr() + PLACE.rows_at
    between = buffers.between.data_ptr()
    columns = 192  # I, in whole steps of the depth
    line = 128  # of a cache, of which rows are whole ones
    sent_bytes, kept = 2 * 512 + line, sizes.hidden_bytes
    assert sizes.sent_bytes == sizes.row_bytes == sent_bytes
    assert kept == 3 * columns * 2 + line + (0 if ranks == 1 else 1024)
    inputs = [sent_bytes, cells] if ranks == 1 else [kept, between + kept - 1024]
    assert maps == [
        *[[2, 64, sent_bytes, cells]] * 8,
        *[[2, 64, kept, between + columns * 2]] * 8,
        [2, 64, kept, between],
        [2, 64, *inputs],
        [2, 64, 512, tensors.w1.data_ptr()],
        [5, 64, 512, tensors.w1.data_ptr()],
        [2, 64, 320, tensors.w2.data_ptr()],
        [5, 64, 8 * 512, tensors.d_w1.data_ptr()],
        [5, 64, 2 * 320, tensors.d_w2.data_ptr()],
    ]
    named = (tensors.d_out, tensors.d_x, tensors.d_topk_weights, tensors.d_w1, tensors.d_w2)
    of_slice = (tensors.d_x_added, tensors.d_shared)
    addresses, added = (
        [0 if tensor is None else tensor.data_ptr() for tensor in some]
        for some in (named, of_slice)
    )
    assert words[len(_MAPS) * MAP_WORDS :][:10].tolist() == [
        *addresses,
        *(0, 0, *added, BLOCKS | CFG.experts << 32),
    ]


def test_a_forward_call_that_saves_is_told_where_behind_all_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_driver, "load", Driver)
    sizes = KernelShape(cfg=CFG, world_size=2, processors=4, saves=True).sizes
    packers = [ArgumentPacker(CFG, sizes, 0, 1.0, 0, RECORDS) for _ in range(2)]
    plain, saving = packers[0], SavingPacker(packers[1])
    buffers, tensors = buffers_of(), call_of(CFG, torch.zeros(3, CFG.hidden, dtype=CFG.dtype))
    for packer in (plain, saving):
        packer.use(buffers)
        packer.pack_code(4096, 512)
    plain.pack(tensors, 77)
    saved = torch.zeros(10, CFG.w1_rows, dtype=CFG.dtype)
    saving.pack(tensors, Share(saved[4:], 3), 77)
    assert saving.record[:RECORD_BYTES].tolist() == plain.record.tolist()
    words = saving.record[RECORD_BYTES:].view("<u8").tolist()
    assert words == [saved[4:].data_ptr(), 3, 0, 0, 0, 0, 0, 0]


def test_pieces_are_added_up() -> None:
    tensors = tensors_of(5, pieces=3)
    counts = []
    for piece in map(with_own_weights, gradient_pieces_of(tensors, 2)):
        assert piece.d_w1 is not None
        assert piece.d_w2 is not None
        assert piece.d_w1.dtype == CFG.dtype
        piece.d_w1.fill_(1.0)
        piece.d_w2.fill_(2.0)
        piece.d_x.fill_(float(len(counts)))
        counts.append(piece.tokens)
        add_weights(tensors, piece)
    assert counts == [2, 2, 1]
    assert tensors.d_x[:, 0].tolist() == [0, 0, 1, 1, 2]
    assert tensors.d_w1 is not None
    assert tensors.d_w2 is not None
    assert bool((tensors.d_w1 == 3.0).all())
    assert bool((tensors.d_w2 == 6.0).all())


def test_a_slot_has_one_expert_whose_slices_each_have_a_pair() -> None:
    """Of two ranks with a slice of each of three experts: places 0 to 2 are one's, then the
    other's.
    """
    pairs = torch.tensor([[[2, 5], [0, 3]], [[1, 4], [-1, -1]]], dtype=torch.int32)
    weights = torch.tensor([[0.5, 0.25], [1.0, 0.0]]).unsqueeze(2).expand(2, 2, 2).contiguous()
    both = (pairs.view(-1).view(torch.uint8), weights.view(-1).view(torch.uint8))
    ids, used = routing_in(
        torch.cat(both),
        {"pair_expert": 0, "pair_weight": len(both[0])},
        *(2, 2),
        pairs=2,
        zero_experts=False,
        expert_at=torch.tensor([0, 1, 2, 0, 1, 2], dtype=torch.int32),
    )
    assert ids.tolist() == [[2, 0], [1, -1]]
    assert used.tolist() == [[0.5, 0.25], [1.0, 0.0]]
    assert ids.is_contiguous()
    assert used.is_contiguous()


@pytest.mark.parametrize(
    ("slicing", "ranks"),
    [(Slicing(2), 2), (Slicing(3, everywhere=False), 3), (Slicing(2, apart=True), 4)],
    ids=str,
)
def test_calls_of_slices_and_their_gradients_note_what_they_do_in_the_same_records(
    slicing: Slicing, ranks: int
) -> None:
    cfg = config(dtype=torch.bfloat16, hidden=256, intermediate=384, experts=16, top_k=4)
    shape = KernelShape(
        cfg=slicing.cut(cfg),
        world_size=slicing.place(0, ranks)[1],
        processors=4,
        virtual_ranks=ranks,
        slicing=slicing,
        places=slicing.placement(cfg.experts, ranks).most if slicing.apart else 0,
    )
    gradients = dataclasses.replace(shape, gradients=True)
    assert sizes_agree(shape.sizes, gradients.sizes)
    # A row of sums has room for H numbers of fp32, one of each choice, and one more.
    assert not slicing.sums or gradients.sizes.row_bytes >= 4 * (cfg.hidden + cfg.top_k + 1)
