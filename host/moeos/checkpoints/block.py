# SPDX-License-Identifier: Apache-2.0
"""Reads the router and expert weights of one Mixture-of-Experts block from a Hugging Face model.

It follows the row of the table of layouts that `names.py` has found. This file must not depend on
the layer that will hold the weights: it returns plain tensors.
"""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from moeos.checkpoints import files, names, state_names
from moeos.checkpoints.shared_names import SharedNames
from moeos.checkpoints.stored import Cut, Stored
from moeos.checkpoints.stored_matrices import (
    HOW_TO_DEQUANTISE,
    LOADABLE,
    PLAIN,
    StoredFormat,
    Unfit,
    hold,
    part_name,
    require_finite,
)
from moeos.config.config import MoEConfig
from moeos.config.element_formats import FORMATS, WeightFormat
from moeos.config.hf.layouts import Layout
from moeos.partition import sharding
from moeos.partition.placement import Placement, experts_of
from moeos.partition.slicing import WHOLE, Slicing
from moeos.system import tensor_memory

_GIB = 2**30


def load_block(
    cfg: MoEConfig,
    state_dict: Mapping[str, Tensor] | str | os.PathLike[str],
    prefix: str,
    rank: int,
    world_size: int,
    ignore: Sequence[str] = (),
    placement: Placement | None = None,
    slicing: Slicing = WHOLE,
) -> dict[str, Tensor]:
    """The weights that `rank` holds of the block under `prefix`, in the layer's own layout.

    docs/checkpoints.md lists the families whose blocks are understood, under the names of
    checkpoint files and under those of transformers' modules. Names decide how a block is read, and
    `cfg.family` where several layouts have the same names; shapes never do. Only this rank's
    experts are read: where experts are stored one by one only these are looked up, and of a tensor
    of all experts in a file (`open_tensors`) only their part.

    Quantised matrices of routed experts are kept as they are shipped in the config's
    `weight_format`. Where that is None, and for shared experts, they are dequantized; a warning
    says so once, with the memory that it costs.

    A DTensor is taken as well. Where it is cut by experts and lies as the ranks' experts do, each
    rank takes its own part. Otherwise its ranks gather it, so that all of them must call.

    No tensor under the prefix is passed over: one that the layer has no use for raises, by its
    name, unless `ignore` says that the caller has. Shared experts are such where
    `cfg.shared_experts` is 0. Where it is not, each rank reads all of them; of one MLP, n shared
    experts take equal parts.

    Args:
        cfg: the layer.
        state_dict: tensors by name, of the whole model or of any part that holds the block; or the
            path of what holds them, as `open_tensors` takes it.
        prefix: what stands before the router's and the experts' names, for example
            "model.layers.0.mlp." or "model.layers.0.block_sparse_moe" (the last dot may be left
            out), or "".
        rank: the rank to load for; X are its experts, `cfg.experts_of(rank, world_size)`, or those
            that `placement` gives it.
        world_size: the number of ranks.
        ignore: what names begin with, below the prefix, of tensors that the caller uses elsewhere:
            ("shared_experts.",), for example. None of them may be the layer's, but where the caller
            routes they may be the router's: then gate.weight is of zeros, and no call reads it.
        placement: where experts lie; None: in order.
        slicing: how a layer's ranks cut experts, `moeos.partition.slicing.slicing_of` of its
            arguments. Each rank then has its slice of its experts, and of shared ones where these
            are cut, too; "b2" is whole. From files it reads only its slice, except for int4,
            DeepSeek-V4's scales, and slices that end inside a block: these tensors it reads one by
            one and keeps its slice.

    Returns:
        contiguous copies in cfg.dtype on the device of the router, with I and Is of a slice:
        "gate.weight" [E, H] in cfg.gate_dtype, "w1" [X, w1_rows, H] with gate rows before up rows,
        "w2" [X, H, I], or codes and scales as a layer with `weight_format` has them, "w1_mxfp4" and
        "w1_scale_mxfp4" for example; where the config has them also "b1" [X, w1_rows] and
        "b2" [X, H], "shared_w1" [n, shared_w1_rows, H], "shared_w2" [n, H, Is], or their codes and
        scales, and "shared_gate" [H], and in fp32 "gate.bias", "gate.selection_bias" and
        "gate.expert_scale" [E].

    Raises:
        OSError: there is no such file or folder.
        TypeError: an argument is of another type; `ignore` is a single string.
        ValueError: a tensor is missing, of another shape or format, or under the prefix and
            neither used nor ignored; or `cfg`, `rank`, `world_size` and `placement` do not fit.
    """
    if placement is not None:
        slicing.refuse_placement()
        placement.require_fits(cfg, world_size)
    slicing.cut(cfg)  # or it raises
    place = slicing.holder(rank), slicing.holders(world_size)
    mine = experts_of(cfg, *place, placement)
    if not isinstance(prefix, str):
        raise TypeError(f"prefix is {prefix!r}; it must be a string, '' for names without one")
    if prefix and not prefix.endswith("."):
        prefix += "."
    if isinstance(state_dict, (str, os.PathLike)):
        state_dict = files.open_tensors(Path(state_dict))
    elif not isinstance(state_dict, Mapping):
        raise TypeError(
            f"state_dict is a {type(state_dict).__name__}; it must be a mapping from names to "
            "tensors, or the path of a folder or file with them, a string"
        )
    found = names.look_through(cfg, state_dict, prefix, ignore)
    if cfg.routing == "caller" and found.layout.router.startswith(tuple(ignore)):
        router = _no_router(cfg, state_dict, prefix)
    else:
        router = _router(cfg, state_dict, prefix, found)
    device = router["gate.weight"].device
    in_order = placement is None or placement.in_order
    slices = (slicing, rank)
    experts = _Experts(cfg, state_dict, prefix, found, mine, place, in_order, device, slices)
    block = router | experts.block()
    if found.shared is not None:
        block |= experts.shared_block(found.shared)
    experts.say_what_it_costs()
    return {state_names.state_name(cfg, name): tensor for name, tensor in block.items()}


def _router(
    cfg: MoEConfig, state_dict: Mapping[str, Tensor], prefix: str, found: names.Names
) -> dict[str, Tensor]:
    """The gate's tensors."""
    layout = found.layout

    def read(name: str, shape: tuple[int, ...]) -> Tensor:
        return sharding.everything(prefix + name, _read(state_dict, prefix + name, shape))

    rows = (cfg.router_rows,)
    weight = read(layout.router, (*rows, cfg.hidden))
    device = weight.device
    if layout.router_scale is not None and layout.experts_norm is not None:
        scale = read(layout.router_scale, (cfg.hidden,)).double() * cfg.hidden**-0.5
        norm = read(layout.experts_norm, (cfg.hidden,)).double()
        if not (norm != 0).all():
            raise ValueError(
                f"{prefix}{layout.experts_norm} has a zero, so that the router cannot be computed "
                "from what the experts read; pass topk_ids and topk_weights"
            )
        weight = weight.double() * (scale / norm)
    block = {"gate.weight": _copy(weight, cfg.gate_dtype, device)}
    if cfg.router_bias:
        bias = read(_there(layout.router_bias, "router_bias", layout, prefix), rows)
        block["gate.bias"] = _copy(bias, torch.float32, device)
    if cfg.selection_bias:
        name = found.selection_bias
        if name is None:
            raise ValueError(names.no_selection_bias(prefix, layout, cfg.router_rows))
        shape = (1, *rows) if len(files.shape_of(state_dict, prefix + name)) == 2 else rows
        block["gate.selection_bias"] = _copy(read(name, shape).view(rows), torch.float32, device)
    if cfg.expert_scale:
        scales = read(_there(layout.expert_scale, "expert_scale", layout, prefix), rows)
        block["gate.expert_scale"] = _copy(scales, torch.float32, device)
    return block


def _no_router(cfg: MoEConfig, state_dict: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """A gate that no call reads, for a layer whose caller routes by a router of its own."""
    device = torch.device("cpu")
    if not isinstance(state_dict, files.ByParts):
        device = next(state_dict[name].device for name in state_dict if name.startswith(prefix))
    has = {
        "bias": cfg.router_bias,
        "selection_bias": cfg.selection_bias,
        "expert_scale": cfg.expert_scale,
    }
    rows = cfg.router_rows
    block = {"gate.weight": torch.zeros(rows, cfg.hidden, dtype=cfg.gate_dtype, device=device)}
    for name in (name for name, there in has.items() if there):
        block[f"gate.{name}"] = torch.zeros(rows, dtype=torch.float32, device=device)
    return block


def _there(name: str | None, field: str, layout: Layout, prefix: str) -> str:
    """The layout's name for the tensor that a field of the config asks for."""
    if name is None:
        raise ValueError(
            f"{field} is True, and what is under {prefix!r} has none: it is stored as "
            f"{layout.name!r} with {layout.router!r}; set {field}=False"
        )
    return name


class _Experts:
    """A rank's experts of one block, and the shared ones."""

    def __init__(
        self,
        cfg: MoEConfig,
        state_dict: Mapping[str, Tensor],
        prefix: str,
        found: names.Names,
        experts: Sequence[int],
        place: tuple[int, int],
        in_order: bool,
        device: torch.device,
        slices: tuple[Slicing, int],
    ) -> None:
        self._cfg = cfg
        self._state_dict = state_dict
        self._prefix = prefix
        self._layout: Layout = found.layout
        self._formats = found.formats
        self._shared_formats = {} if found.shared is None else found.shared.formats
        self._experts = experts
        self._place = place  # the rank among those that divide experts, and their number
        self._in_order = in_order  # as `MoEConfig.experts_of` says
        self._device = device
        self._slicing, self._rank = slices  # how experts are cut, and which rank holds them
        self._part = self._slicing.cut(cfg)  # the config of a slice
        self._stored = 0  # bytes of quantized tensors, in the file
        self._held = 0  # and dequantized

    def block(self) -> dict[str, Tensor]:
        """Both weights, and biases."""
        cfg, part, layout = self._cfg, self._part, self._layout
        block: dict[str, Tensor] = {}
        for name, names_, whole, mine in (
            ("w1", layout.first, (cfg.w1_rows, cfg.hidden), (part.w1_rows, cfg.hidden)),
            (
                "w2",
                (layout.second,),
                (cfg.hidden, cfg.intermediate),
                (cfg.hidden, part.intermediate),
            ),
        ):
            stored = self._matrix(names_, whole, mine, gates=name == "w1")
            if cfg.weight_format is None:
                block[name] = self._matrices(stored)
            else:
                block |= self._held_matrices(name, stored)
        if cfg.bias:
            if layout.second_bias is None:
                raise ValueError(
                    f"bias is True, and the experts under {self._prefix!r} have none: they are "
                    f"stored as {layout.name!r}"
                )
            rows = (cfg.w1_rows,), (part.w1_rows,)
            block["b1"] = self._vectors(self._matrix(layout.first_biases, *rows, gates=True))
            hidden = (cfg.hidden,)  # whole on each rank: one of them adds it
            block["b2"] = self._vectors(self._matrix((layout.second_bias,), hidden, hidden))
        return block

    def _matrix(
        self,
        names_: tuple[str, ...],
        whole: tuple[int, ...],
        mine: tuple[int, ...],
        *,
        gates: bool = False,
    ) -> Stored:
        """A matrix or bias of these sizes; `gates`: its rows are those of gate and of up."""
        number = self._slicing.slice_of(self._rank)
        halves = self._cfg.halves if gates else 1
        return Stored(names_, whole, mine, number, halves, gates and self._layout.interleaved)

    def shared_block(self, found: SharedNames) -> dict[str, Tensor]:
        """Both weights of the shared experts, and their gate."""
        cfg, layout = self._cfg, found.layout
        if cfg.shared_weight_format is None:
            block = self._shared_matrices(found)
        else:
            block = self._held_shared(found, cfg.shared_weight_format)
        if cfg.shared_gate:
            if layout.gate is None:
                raise ValueError(
                    f"shared_gate is True, and what is under {self._prefix!r} has none: set "
                    "shared_gate=False"
                )
            gate = self._whole(found, layout.gate, (1, cfg.hidden), PLAIN)
            block["shared_gate"] = _copy(gate.reshape(-1), cfg.dtype, self._device)
        return block

    def _shared_matrices(self, found: SharedNames) -> dict[str, Tensor]:
        """Both weights, dequantized."""
        cfg, layout = self._cfg, found.layout
        n, width = cfg.shared_experts, cfg.shared_intermediate
        halves = cfg.shared_w1_rows // width  # gate and up, or one
        own = self._part.shared_intermediate
        w1 = torch.empty((n, halves, own, cfg.hidden), dtype=cfg.dtype, device=self._device)
        of_each = halves // len(layout.first)
        for number, name in enumerate(layout.first):
            rows = self._whole(found, name, (of_each * n * width, cfg.hidden))
            for half, part in enumerate(rows.view(of_each, n, width, cfg.hidden)):
                into = w1[:, number * of_each + half]
                into.copy_(self._mine_of(part, into.shape))
        w2 = torch.empty((n, cfg.hidden, own), dtype=cfg.dtype, device=self._device)
        columns = self._whole(found, layout.second, (cfg.hidden, n * width))
        every = columns.view(cfg.hidden, n, width).transpose(0, 1)
        w2.copy_(self._mine_of(every, w2.shape))
        return {"shared_w1": w1.flatten(1, 2), "shared_w2": w2}

    def _held_shared(self, found: SharedNames, wanted: WeightFormat) -> dict[str, Tensor]:
        """The shared experts as they are shipped: codes and scales, by their names in the layer."""
        cfg, part, layout = self._cfg, self._part, found.layout
        n, width = cfg.shared_experts, cfg.shared_intermediate
        if n > 1:
            raise ValueError(
                f"shared_experts is {n}, and shared experts in a format are read as one MLP, as "
                f"files have them: set shared_experts=1 and shared_intermediate={n * width}, or "
                "shared_weight_format=None"
            )
        block: dict[str, Tensor] = {}
        own = part.shared_intermediate
        for name, matrices, shape, mine, halves in (
            (
                *("shared_w1", layout.first, (cfg.shared_w1_rows, cfg.hidden)),
                *((part.shared_w1_rows, cfg.hidden), cfg.halves),
            ),
            ("shared_w2", (layout.second,), (cfg.hidden, width), (cfg.hidden, own), 1),
        ):
            made = self._rooms(1, wanted, mine, halves)
            count = len(matrices)
            each = (shape[0] // count, shape[1])
            for number, matrix in enumerate(matrices):
                row = found.formats[matrix]
                parts = self._whole_parts(found, matrix, row, each)
                first = found.prefix + part_name(matrix, row.parts[0])
                _require_held(row, first, "shared_weight_format", wanted)
                name_of = lambda part: found.prefix + part_name(matrix, part)  # noqa: E731, B023
                with _named(name_of, "shared_weight_format"):
                    require_finite(row, parts)
                    held = hold(row, parts, each, halves // count, wanted)
                for into, its in zip(made, held, strict=True):
                    if into is not None and its is not None:
                        room = into.chunk(count, 1)[number]
                        whole = its.unsqueeze(0)
                        room.copy_(self._mine_of(whole, room.shape, halves // count))
            block |= _by_name(name, made)
        return block

    def _whole_parts(
        self, found: SharedNames, matrix: str, row: StoredFormat, shape: tuple[int, int]
    ) -> dict[str, Tensor]:
        """The parts of a matrix of the shared experts, on this device."""
        parts = {}
        for part in row.parts:
            name = found.prefix + part_name(matrix, part)
            tensor = sharding.everything(name, self._one(name, row, shape))
            parts[part] = tensor.to(self._device)
        return parts

    def _whole(
        self,
        found: SharedNames,
        matrix: str,
        shape: tuple[int, int],
        row: StoredFormat | None = None,
    ) -> Tensor:
        """A matrix of the shared experts, dequantized, on this device."""
        row = row or found.formats[matrix]
        parts = self._whole_parts(found, matrix, row, shape)
        made = _matrix_of(row, parts, shape, lambda part: found.prefix + part_name(matrix, part))
        mine = math.prod(shape) // self._cfg.shared_intermediate * self._part.shared_intermediate
        self._count(row, parts, math.prod(shape), mine)
        return made.contiguous()

    def say_what_it_costs(self) -> None:
        """Warns of the memory that dequantized weights take, if there are any."""
        routed = self._formats.values() if self._cfg.weight_format is None else ()
        shared = self._shared_formats.values() if self._cfg.shared_weight_format is None else ()
        every = (*routed, *shared)
        said = [row.said for row in every if row.name != "plain"]
        if said:
            warnings.warn(
                f"experts in {', '.join(dict.fromkeys(said))} are dequantised to "
                f"{self._cfg.dtype}: those of a layer take {self._held / _GIB:.3g} GiB on each "
                f"rank, and {self._stored / _GIB:.3g} GiB as they are stored",
                stacklevel=4,
            )

    def _matrices(self, stored: Stored) -> Tensor:
        """[X, rows, columns]: the rows of all matrices, one after the other."""
        made = self._empty(stored.mine)
        for number, template in enumerate(stored.names):
            into = made.chunk(len(stored.names), 1)[number]
            row = self._formats[template]
            for local, parts, taken in self._each(template, row, stored):
                matrix = self._dequantise(row, template, parts, taken, local)
                ordered = _in_order(matrix, stored.interleaved).unsqueeze(0)
                room = into[local : local + 1]
                room.copy_(self._mine_of(ordered, room.shape, stored.halves_of_each))
                self._count(row, parts, math.prod(taken), math.prod(stored.my_each))
        return made

    def _held_matrices(self, name: str, stored: Stored) -> dict[str, Tensor]:
        """The routed experts' matrix in the config's format, as it is shipped: codes and scales, by
        their names in the layer.
        """
        wanted = self._cfg.weight_format
        assert wanted is not None
        made = self._rooms(len(self._experts), wanted, stored.mine, stored.halves)
        count, halves = len(stored.names), stored.halves_of_each
        for number, template in enumerate(stored.names):
            row = self._formats[template]
            for local, parts, (rows, columns) in self._each(template, row, stored):
                first = self._part_name(template, row.parts[0], local)
                _require_held(row, first, "weight_format", wanted)
                with _named(lambda part: self._part_name(template, part, local)):  # noqa: B023
                    require_finite(row, parts)
                    held = hold(row, parts, (rows, columns), halves, wanted)
                for into, part in zip(made, held, strict=True):
                    if into is not None and part is not None:
                        room = into[local : local + 1].chunk(count, 1)[number]
                        whole = _in_order(part, stored.interleaved).unsqueeze(0)
                        room.copy_(self._mine_of(whole, room.shape, halves))
        return _by_name(name, made)

    def _mine_of(self, whole: Tensor, mine: torch.Size, halves: int = 1) -> Tensor:
        """This rank's slice, of shape `mine`, of an experts' tensor [X, ...]; or all of it."""
        return self._slicing.part(whole, whole.shape, mine, halves, self._rank)

    def _rooms(
        self, number: int, wanted: WeightFormat, shape: tuple[int, ...], halves: int
    ) -> list[Tensor | None]:
        """Empty tensors for codes, scales and second scales of `number` matrices."""
        kept, (rows, columns) = FORMATS[wanted], shape
        each: list[tuple[tuple[int, ...], torch.dtype]] = [
            (kept.code_shape(rows, columns), kept.code_dtype),
            (kept.scale_shape(halves, rows // halves, columns), kept.scale_dtype),
        ]
        if kept.scale_2:
            each.append(((halves,), torch.float32))
        made: list[Tensor | None] = [
            torch.empty((number, *its), dtype=dtype, device=self._device) for its, dtype in each
        ]
        return made if kept.scale_2 else [*made, None]

    def _part_name(self, template: str, part: str, local: int) -> str:
        """The name of a part of one of these experts' matrices."""
        return self._prefix + part_name(template, part).format(self._experts[local])

    def _count(self, row: StoredFormat, parts: Mapping[str, Tensor], taken: int, kept: int) -> None:
        """Adds a matrix of which `taken` numbers were read and `kept` numbers are kept to the
        memory of dequantized weights.
        """
        if row is not PLAIN:
            self._stored += sum(part.nbytes for part in parts.values()) * kept // taken
            self._held += kept * self._cfg.dtype.itemsize

    def _vectors(self, stored: Stored) -> Tensor:
        """The biases, [X, length]."""
        made = self._empty(stored.mine)
        for number, template in enumerate(stored.names):
            into = made.chunk(len(stored.names), 1)[number]
            for local, parts, _ in self._each(template, PLAIN, stored):
                into[local].copy_(_in_order(parts["weight"], stored.interleaved))
        return made

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """An empty tensor with `shape` for each expert; by default in the layer's dtype."""
        shape = (len(self._experts), *shape)
        return torch.empty(shape, dtype=dtype or self._cfg.dtype, device=self._device)

    def _dequantise(
        self,
        row: StoredFormat,
        template: str,
        parts: Mapping[str, Tensor],
        shape: tuple[int, ...],
        local: int,
    ) -> Tensor:
        if self._layout.transposed:
            parts = {name: part.mT for name, part in parts.items()}
        rows, columns = shape
        return _matrix_of(
            *(row, parts, (rows, columns)), lambda part: self._part_name(template, part, local)
        )

    def _each(
        self, template: str, row: StoredFormat, stored: Stored
    ) -> Iterator[tuple[int, dict[str, Tensor], tuple[int, ...]]]:
        """The parts and the shape of each expert's tensor of one name; experts are numbered from 0.
        Parts that can be cut are this rank's slice, others are whole. A bias, too, is such a
        tensor, of one part.
        """
        shape = stored.each
        if self._layout.stacked:
            stacked = {part: part_name(template, part) for part in row.parts}
            cuts = self._cuts(row, stored, stacked, 1)
            turned = self._layout.transposed and len(shape) == 2
            every = {
                part: self._stacked(name, row, shape, _turned(cuts.get(part), turned))
                for part, name in stacked.items()
            }
            for local in range(len(self._experts)):
                parts = {part: read(local) for part, read in every.items()}
                yield local, parts, stored.my_each if cuts else shape
            return
        names = {part: part_name(template, part) for part in row.parts}
        # A file has no DTensor, and must not be read twice.
        gathered = not isinstance(self._state_dict, files.ByParts) and any(
            sharding.is_cut(self._state_dict.get(self._prefix + name.format(expert)))
            for name in names.values()
            for expert in (self._experts or range(1))[:1]  # an empty rank gathers, too
        )
        # Gathering is collective: each rank then asks for all experts, in the same order.
        for expert in range(self._cfg.experts) if gathered else self._experts:
            parts = {}
            cuts = self._cuts(row, stored, {p: name.format(expert) for p, name in names.items()})
            for part, name in names.items():
                cut = cuts.get(part)
                name = self._prefix + name.format(expert)  # which may have braces of its own
                tensor = self._one(name, row, shape, cut)
                if sharding.is_cut(tensor) and not gathered:
                    raise ValueError(
                        f"{name} is a DTensor that is cut into parts, and the first expert's is "
                        "not: pass all experts alike, or whole tensors (DTensor.full_tensor)"
                    )
                whole = sharding.everything(name, tensor)
                if cut is not None and whole.shape == shape:  # which no slice has
                    whole = cut.of(whole)
                parts[part] = whole.to(self._device)
            if expert in self._experts:
                yield self._experts.index(expert), parts, stored.my_each if cuts else shape

    def _cuts(
        self, row: StoredFormat, stored: Stored, names_: Mapping[str, str], dims: int = 0
    ) -> dict[str, Cut | None]:
        """The cuts that this rank takes of the parts with these names; None for a part that it
        takes whole; empty where it takes all parts whole. `dims`: the dimensions before the
        expert's own.
        """
        if row is PLAIN:
            return {} if stored.cut is None else {"weight": stored.cut}
        tensors = self._state_dict
        if not isinstance(tensors, files.ByParts):
            return {}  # nothing has to be read
        full = {part: self._prefix + name for part, name in names_.items()}
        if not all(name in tensors for name in full.values()):
            return {}  # the reader raises for missing parts
        return stored.cuts(
            row.grains, {part: tensors.shape_of(name)[dims:] for part, name in full.items()}
        )

    def _one(
        self, name: str, row: StoredFormat, shape: tuple[int, ...], cut: Cut | None = None
    ) -> Tensor:
        """A tensor of one expert; from a file only `cut`, if given."""
        if row is PLAIN:
            if cut is not None and isinstance(self._state_dict, files.ByParts):
                return _read_cut(self._state_dict, name, shape, cut)
            return _read(self._state_dict, name, shape)
        if name not in self._state_dict:
            raise ValueError(f"{name} is missing; {row.said} needs it")
        if cut is not None and isinstance(self._state_dict, files.ByParts):
            return _runs(self._state_dict, name, cut)
        return _take(self._state_dict, name)

    def _stacked(
        self, name: str, row: StoredFormat, shape: tuple[int, ...], cut: Cut | None
    ) -> Callable[[int], Tensor]:
        """A function that reads one of these experts from a tensor of all experts; only `cut` of
        it, if given.
        """
        cfg, layout = self._cfg, self._layout
        padded = layout.zero_experts_padded and not name.startswith(layout.second)
        total = cfg.router_rows if padded else cfg.experts
        name = self._prefix + name
        each = (shape[::-1] if layout.transposed else shape) if row is PLAIN else None
        if name not in self._state_dict:
            needed = f"{row.said} needs it" if each is None else _needed((total, *each))
            raise ValueError(f"{name} is missing; {needed}")
        found = files.shape_of(self._state_dict, name)
        if found[:1] != (total,) or each not in (None, found[1:]):
            wanted = (total, *(found[1:] if each is None else each))
            raise ValueError(f"{name} has shape {list(found)}; this config needs {list(wanted)}")
        own, tensors = self._experts, self._state_dict
        if isinstance(tensors, files.ByParts):
            dims = len(found) - 1
            indices: list[tuple[slice, ...]] = [()] if cut is None else cut.indices(dims)

            def read(local: int) -> Tensor:
                expert = slice(own[local], own[local] + 1)
                runs = [tensors.part(name, (expert, *index))[0] for index in indices]
                return (runs[0] if cut is None else cut.joined(runs)).to(self._device)

            return read
        tensor = _take(tensors, name)
        if total == cfg.experts:
            rest = torch.Size(found[1:])
            rows = sharding.part(
                name, tensor, own, total, rest, *self._place, in_order=self._in_order
            )
        else:
            rows = sharding.rows_of(sharding.everything(name, tensor), own)
        return lambda local: (rows[local] if cut is None else cut.of(rows[local])).to(self._device)


def _by_name(name: str, made: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """Codes and scales by their names in the layer."""
    names = (name, f"{name}_scale", f"{name}_scale_2")
    return {end: part for end, part in zip(names, made, strict=True) if part is not None}


def _require_held(row: StoredFormat, name: str, field: str, wanted: WeightFormat) -> None:
    """Raises for a matrix that is shipped in another format than a field of the config says."""
    if wanted in row.held_as:
        return
    instead = "None"  # shared experts have the routed ones' format, or none
    if field == "weight_format":
        instead = " or ".join(map(repr, row.held_as)) or "None, and moeos.quantize the layer"
    raise ValueError(f"{name} is {row.said}, and {field} is {wanted!r}: set {field}={instead}")


def _matrix_of(
    row: StoredFormat,
    parts: Mapping[str, Tensor],
    shape: tuple[int, int],
    name: Callable[[str], str],
) -> Tensor:
    """A matrix from its parts; `name`: names each part in errors."""
    with _named(name):
        require_finite(row, parts)
        return row.dequantise(parts, shape)


@contextlib.contextmanager
def _named(name: Callable[[str], str], field: str = "weight_format") -> Iterator[None]:
    """Raises `ValueError`, with the name of the part, for `Unfit`.

    `field`: what the config calls the format.
    """
    try:
        yield
    except Unfit as error:
        said = f"{name(error.part)} {error.reason}"
        if error.instead != ():
            # Shared experts have the routed ones' format, or none.
            instead = None if field == "shared_weight_format" else error.instead
            said += f": set {field}={instead!r}"
            if instead is None and field == "weight_format":
                said += ", which MoEConfig.from_hf(..., dequantize=True) does"
        raise ValueError(said) from None


def _in_order(rows: Tensor, interleaved: bool) -> Tensor:
    """Gate rows, then up rows, from interleaved rows."""
    return torch.cat((rows[0::2], rows[1::2])) if interleaved else rows


def _needed(shape: tuple[int, ...]) -> str:
    return f"this config needs it with shape {list(shape)}"


def _read(state_dict: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor that is not quantized."""
    _require_there(state_dict, name, shape)
    tensor = _take(state_dict, name)
    _require_fits(name, tuple(tensor.shape), shape)
    return _require_numbers(name, tensor)


def _read_cut(tensors: files.ByParts, name: str, shape: tuple[int, ...], cut: Cut) -> Tensor:
    """A part of such a tensor in a file; nothing else of it is read."""
    _require_there(tensors, name, shape)
    _require_fits(name, tensors.shape_of(name), shape)
    return _require_numbers(name, _runs(tensors, name, cut))


def _runs(tensors: files.ByParts, name: str, cut: Cut) -> Tensor:
    """A part of a tensor in a file; nothing else of it is read."""
    indices = cut.indices(len(tensors.shape_of(name)))
    return cut.joined([tensors.part(name, index) for index in indices])


def _turned(cut: Cut | None, turned: bool) -> Cut | None:
    return cut.turned() if cut is not None and turned else cut


def _require_there(tensors: Container[str], name: str, shape: tuple[int, ...]) -> None:
    if name not in tensors:
        raise ValueError(f"{name} is missing; {_needed(shape)}")


def _require_fits(name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
    if found != shape:
        raise ValueError(f"{name} has shape {list(found)}; this config needs {list(shape)}")


def _require_numbers(name: str, tensor: Tensor) -> Tensor:
    """The tensor, unless it is quantized."""
    if tensor.dtype not in LOADABLE:
        raise ValueError(f"{name} is {tensor.dtype}; {HOW_TO_DEQUANTISE}")
    return tensor


def _take(state_dict: Mapping[str, Tensor], name: str) -> Tensor:
    """A tensor with values that can be read; raises `TypeError` or `ValueError` for others."""
    tensor = tensor_memory.require_dense(name, state_dict[name]).detach()
    if tensor.is_meta:
        raise ValueError(
            f"{name} has no values, as it is on the meta device: pass tensors that were loaded"
        )
    if type(tensor) is not Tensor:  # a DTensor, say, has no memory but its parts'
        return tensor
    tensor = tensor_memory.without_laziness(tensor)
    tensor_memory.require_memory(name, tensor)
    return tensor


def _copy(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    return tensor.to(device, dtype, copy=True, memory_format=torch.contiguous_format)
