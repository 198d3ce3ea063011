# SPDX-License-Identifier: Apache-2.0
"""Reads the router and expert weights of one Mixture-of-Experts block from a Hugging Face model.

It follows the row of the table of layouts that `names.py` has found, and knows nothing of the layer
that will hold the weights: it returns plain tensors.
"""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from moeos import sharding, state_names, tensor_memory
from moeos.checkpoints import files, names
from moeos.checkpoints.formats import (
    HOW_TO_DEQUANTISE,
    LOADABLE,
    PLAIN,
    Format,
    Unfit,
    hold,
    part_name,
)
from moeos.checkpoints.layouts import Layout
from moeos.checkpoints.shared_names import SharedNames
from moeos.config import MoEConfig
from moeos.formats import FORMATS, WeightFormat
from moeos.placement import Placement, experts_of

_GIB = 2**30


def load_block(
    cfg: MoEConfig,
    state_dict: Mapping[str, Tensor] | str | os.PathLike[str],
    prefix: str,
    rank: int,
    world_size: int,
    ignore: Sequence[str] = (),
    placement: Placement | None = None,
) -> dict[str, Tensor]:
    """The weights that `rank` holds of the block under `prefix`, in the layer's own layout.

    docs/checkpoints.md lists the families whose blocks are understood, under the names of
    checkpoint files and under those of transformers' modules. Names decide how a block is read, and
    `cfg.layout` where several layouts have the same names; shapes never do. Only this rank's
    experts are read: where experts are stored one by one only these are looked up, and of a tensor
    of all experts in a file (`open_tensors`) only their part.

    Quantised matrices of routed experts are kept as they are shipped in the config's
    `weight_format`. Where it is None, and of shared experts, they are dequantised, which is said
    once, with the memory that it costs.

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

    Returns:
        contiguous copies in cfg.dtype on the device of the router: "gate.weight" [E, H] in
        cfg.gate_dtype, "w1" [X, w1_rows, H] with gate rows before up rows, "w2" [X, H, I], or
        codes and scales as a layer with `weight_format` has them, "w1_mxfp4" and "w1_scale_mxfp4"
        for example; where the config has them also
        "b1" [X, w1_rows] and "b2" [X, H], "shared_w1" [n, shared_w1_rows, H], "shared_w2"
        [n, H, Is], or their codes and scales, and "shared_gate" [H], and in fp32
        "gate.bias", "gate.selection_bias" and "gate.expert_scale" [E].

    Raises:
        OSError: there is no such file or folder.
        TypeError: an argument is of another type; `ignore` is a single string.
        ValueError: a tensor is missing, of another shape or format, or under the prefix and
            neither used nor ignored; or `cfg`, `rank`, `world_size` and `placement` do not fit.
    """
    if placement is not None:
        placement.require_fits(cfg, world_size)
    mine = experts_of(cfg, rank, world_size, placement)
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
    place = (rank, world_size)
    in_order = placement is None or placement.in_order
    experts = _Experts(cfg, state_dict, prefix, found, mine, place, in_order, device)
    block = router | experts.block()
    if found.shared is not None:
        block |= experts.shared_block(found.shared)
    experts.say_what_it_costs()
    return {state_names.state_name(cfg, name): tensor for name, tensor in block.items()}


def _router(
    cfg: MoEConfig, state_dict: Mapping[str, Tensor], prefix: str, found: names.Names
) -> dict[str, Tensor]:
    """All that the gate holds."""
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
    if not isinstance(state_dict, files.ByRows):
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
    """The name that a layout has for what a field of the config asks for."""
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
    ) -> None:
        self._cfg = cfg
        self._state_dict = state_dict
        self._prefix = prefix
        self._layout: Layout = found.layout
        self._formats = found.formats
        self._shared_formats = {} if found.shared is None else found.shared.formats
        self._experts = experts
        self._place = place  # the rank whose they are, and how many ranks there are
        self._in_order = in_order  # as `MoEConfig.experts_of` says
        self._device = device
        self._stored = 0  # bytes of what was quantised, in the file
        self._held = 0  # and dequantised

    def block(self) -> dict[str, Tensor]:
        """Both weights, and biases."""
        cfg, layout = self._cfg, self._layout
        block: dict[str, Tensor] = {}
        for name, templates, shape, halves, interleaved in (
            ("w1", layout.first, (cfg.w1_rows, cfg.hidden), cfg.halves, layout.interleaved),
            ("w2", (layout.second,), (cfg.hidden, cfg.intermediate), 1, False),
        ):
            if cfg.weight_format is None:
                block[name] = self._matrices(templates, shape, interleaved)
            else:
                block |= self._held_matrices(name, templates, shape, halves, interleaved)
        if cfg.bias:
            if layout.second_bias is None:
                raise ValueError(
                    f"bias is True, and the experts under {self._prefix!r} have none: they are "
                    f"stored as {layout.name!r}"
                )
            block["b1"] = self._vectors(layout.first_biases, cfg.w1_rows, layout.interleaved)
            block["b2"] = self._vectors((layout.second_bias,), cfg.hidden)
        return block

    def shared_block(self, found: SharedNames) -> dict[str, Tensor]:
        """Both weights of the shared experts, and what weighs them."""
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
        """Both weights, in numbers."""
        cfg, layout = self._cfg, found.layout
        n, width = cfg.shared_experts, cfg.shared_intermediate
        halves = cfg.shared_w1_rows // width  # gate and up, or one
        w1 = torch.empty((n, halves, width, cfg.hidden), dtype=cfg.dtype, device=self._device)
        of_each = halves // len(layout.first)
        for number, name in enumerate(layout.first):
            rows = self._whole(found, name, (of_each * n * width, cfg.hidden))
            for half, part in enumerate(rows.view(of_each, n, width, cfg.hidden)):
                w1[:, number * of_each + half].copy_(part)
        w2 = torch.empty((n, cfg.hidden, width), dtype=cfg.dtype, device=self._device)
        columns = self._whole(found, layout.second, (cfg.hidden, n * width))
        w2.copy_(columns.view(cfg.hidden, n, width).transpose(0, 1))
        return {"shared_w1": w1.flatten(1, 2), "shared_w2": w2}

    def _held_shared(self, found: SharedNames, wanted: WeightFormat) -> dict[str, Tensor]:
        """The same as they are shipped: codes and scales, by their names in the layer."""
        cfg, layout = self._cfg, found.layout
        n, width = cfg.shared_experts, cfg.shared_intermediate
        if n > 1:
            raise ValueError(
                f"shared_experts is {n}, and shared experts in a format are read as one MLP, as "
                f"files have them: set shared_experts=1 and shared_intermediate={n * width}, or "
                "shared_weight_format=None"
            )
        block: dict[str, Tensor] = {}
        for name, matrices, shape, halves in (
            ("shared_w1", layout.first, (cfg.shared_w1_rows, cfg.hidden), cfg.halves),
            ("shared_w2", (layout.second,), (cfg.hidden, width), 1),
        ):
            made = self._rooms(1, wanted, shape, halves)
            count = len(matrices)
            each = (shape[0] // count, shape[1])
            for number, matrix in enumerate(matrices):
                row = found.formats[matrix]
                parts = self._whole_parts(found, matrix, row, each)
                first = found.prefix + part_name(matrix, row.parts[0])
                _require_held(row, first, "shared_weight_format", wanted)
                with _named(lambda part: found.prefix + part_name(matrix, part)):  # noqa: B023
                    held = hold(row, parts, each, halves // count, wanted)
                for into, its in zip(made, held, strict=True):
                    if into is not None and its is not None:
                        into[0].chunk(count)[number].copy_(its)
            block |= _by_name(name, made)
        return block

    def _whole_parts(
        self, found: SharedNames, matrix: str, row: Format, shape: tuple[int, int]
    ) -> dict[str, Tensor]:
        """The parts of a matrix of the shared experts, on this device."""
        parts = {}
        for part in row.parts:
            name = found.prefix + part_name(matrix, part)
            tensor = sharding.everything(name, self._one(name, row, shape))
            parts[part] = tensor.to(self._device)
        return parts

    def _whole(
        self, found: SharedNames, matrix: str, shape: tuple[int, int], row: Format | None = None
    ) -> Tensor:
        """A matrix of the shared experts, dequantised, on this device."""
        row = row or found.formats[matrix]
        parts = self._whole_parts(found, matrix, row, shape)
        made = _matrix_of(row, parts, shape, lambda part: found.prefix + part_name(matrix, part))
        self._count(row, parts, shape)
        return made.contiguous()

    def say_what_it_costs(self) -> None:
        """Warns of the memory that dequantised weights take, if there are any."""
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

    def _matrices(
        self, templates: tuple[str, ...], shape: tuple[int, int], interleaved: bool = False
    ) -> Tensor:
        """[X, *shape]: the rows of all matrices, one after the other."""
        made = self._empty(shape)
        rows, columns = shape[0] // len(templates), shape[1]
        for number, template in enumerate(templates):
            into = made[:, number * rows : (number + 1) * rows]
            row = self._formats[template]
            for local, parts in self._each(template, row, (rows, columns)):
                matrix = self._dequantise(row, template, parts, (rows, columns), local)
                into[local].copy_(_in_order(matrix, interleaved))
                self._count(row, parts, (rows, columns))
        return made

    def _held_matrices(
        self,
        name: str,
        templates: tuple[str, ...],
        shape: tuple[int, int],
        halves: int,
        interleaved: bool,
    ) -> dict[str, Tensor]:
        """The same in the config's format, as they are shipped: codes and scales, by their names in
        the layer.
        """
        wanted = self._cfg.weight_format
        assert wanted is not None
        made = self._rooms(len(self._experts), wanted, shape, halves)
        number_of = len(templates)
        each = (shape[0] // number_of, shape[1])
        for number, template in enumerate(templates):
            row = self._formats[template]
            for local, parts in self._each(template, row, each):
                first = self._part(template, row.parts[0], local)
                _require_held(row, first, "weight_format", wanted)
                with _named(lambda part: self._part(template, part, local)):  # noqa: B023
                    held = hold(row, parts, each, halves // number_of, wanted)
                for into, part in zip(made, held, strict=True):
                    if into is not None and part is not None:
                        its = into[local].chunk(number_of)[number]
                        its.copy_(_in_order(part, interleaved))
        return _by_name(name, made)

    def _rooms(
        self, number: int, wanted: WeightFormat, shape: tuple[int, int], halves: int
    ) -> list[Tensor | None]:
        """For codes, scales and second scales of so many matrices."""
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

    def _part(self, template: str, part: str, local: int) -> str:
        """The name of a part of one of these experts' matrices."""
        return self._prefix + part_name(template, part).format(self._experts[local])

    def _count(self, row: Format, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> None:
        """Adds a matrix to what dequantised ones take."""
        if row.name != "plain":
            self._stored += sum(part.nbytes for part in parts.values())
            self._held += math.prod(shape) * self._cfg.dtype.itemsize

    def _vectors(
        self, templates: tuple[str, ...], length: int, interleaved: bool = False
    ) -> Tensor:
        """[X, length]: the same of biases."""
        made = self._empty((length,))
        each = length // len(templates)
        for number, template in enumerate(templates):
            into = made[:, number * each : (number + 1) * each]
            for local, parts in self._each(template, PLAIN, (each,)):
                into[local].copy_(_in_order(parts["weight"], interleaved))
        return made

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Of each of these experts; in the layer's dtype where none is given."""
        shape = (len(self._experts), *shape)
        return torch.empty(shape, dtype=dtype or self._cfg.dtype, device=self._device)

    def _dequantise(
        self,
        row: Format,
        template: str,
        parts: Mapping[str, Tensor],
        shape: tuple[int, int],
        local: int,
    ) -> Tensor:
        if self._layout.transposed:
            parts = {name: part.mT for name, part in parts.items()}
        return _matrix_of(row, parts, shape, lambda part: self._part(template, part, local))

    def _each(
        self, template: str, row: Format, shape: tuple[int, ...]
    ) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """The parts of a tensor [*shape] of each of the experts, which are numbered from 0.

        A bias, too, is such a tensor, of one part.
        """
        if self._layout.stacked:
            every = {part: self._slice(part_name(template, part), row, shape) for part in row.parts}
            for local in range(len(self._experts)):
                yield local, {part: tensor[local] for part, tensor in every.items()}
            return
        names = {part: part_name(template, part) for part in row.parts}
        # A file has no DTensor, and nothing of it is to be read twice.
        gathered = not isinstance(self._state_dict, files.ByRows) and any(
            sharding.is_cut(self._state_dict.get(self._prefix + name.format(expert)))
            for name in names.values()
            for expert in (self._experts or range(1))[:1]  # who has none gathers with the others
        )
        # To gather is collective: then each rank asks for all experts, in the same order.
        for expert in range(self._cfg.experts) if gathered else self._experts:
            parts = {}
            for part, name in names.items():
                name = self._prefix + name.format(expert)  # which may have braces of its own
                tensor = self._one(name, row, shape)
                if sharding.is_cut(tensor) and not gathered:
                    raise ValueError(
                        f"{name} is a DTensor that is cut into parts, and the first expert's is "
                        "not: pass all experts alike, or whole tensors (DTensor.full_tensor)"
                    )
                parts[part] = sharding.everything(name, tensor).to(self._device)
            if expert in self._experts:
                yield self._experts.index(expert), parts

    def _one(self, name: str, row: Format, shape: tuple[int, ...]) -> Tensor:
        """A tensor of one expert."""
        if row.name == "plain":
            return _read(self._state_dict, name, shape)
        if name not in self._state_dict:
            raise ValueError(f"{name} is missing; {row.said} needs it")
        return _take(self._state_dict, name)

    def _slice(self, name: str, row: Format, shape: tuple[int, ...]) -> Tensor:
        """These experts' part of a tensor of all experts."""
        cfg, layout = self._cfg, self._layout
        padded = layout.zero_experts_padded and not name.startswith(layout.second)
        total = cfg.router_rows if padded else cfg.experts
        name = self._prefix + name
        each = (shape[::-1] if layout.transposed else shape) if row.name == "plain" else None
        if name not in self._state_dict:
            needed = f"{row.said} needs it" if each is None else _needed((total, *each))
            raise ValueError(f"{name} is missing; {needed}")
        found = files.shape_of(self._state_dict, name)
        if found[:1] != (total,) or each not in (None, found[1:]):
            wanted = (total, *(found[1:] if each is None else each))
            raise ValueError(f"{name} has shape {list(found)}; this config needs {list(wanted)}")
        own = self._experts
        if isinstance(self._state_dict, files.ByRows):
            of_runs = [self._state_dict.rows(name, *run) for run in _runs(own)]
            rows = of_runs[0] if len(of_runs) == 1 else torch.cat(of_runs)
            return rows.to(self._device)
        tensor = _take(self._state_dict, name)
        if total == cfg.experts:
            rest = torch.Size(found[1:])
            part = sharding.part(
                name, tensor, own, total, rest, *self._place, in_order=self._in_order
            )
            return part.to(self._device)
        return sharding.rows_of(sharding.everything(name, tensor), own).to(self._device)


def _runs(experts: Sequence[int]) -> list[tuple[int, int]]:
    """Where runs of experts that follow each other begin and end; at least one, if of none."""
    runs: list[tuple[int, int]] = []
    for expert in experts:
        if runs and runs[-1][1] == expert:
            runs[-1] = (runs[-1][0], expert + 1)
        else:
            runs.append((expert, expert + 1))
    return runs or [(0, 0)]


def _by_name(name: str, made: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """Codes and scales by their names in the layer."""
    names = (name, f"{name}_scale", f"{name}_scale_2")
    return {end: part for end, part in zip(names, made, strict=True) if part is not None}


def _require_held(row: Format, name: str, field: str, wanted: WeightFormat) -> None:
    """Raises for a matrix that is shipped in another format than a field of the config says."""
    if wanted in row.held_as:
        return
    instead = "None"  # shared experts have the routed ones' format, or none
    if field == "weight_format":
        instead = " or ".join(map(repr, row.held_as)) or "None, and moeos.quantize the layer"
    raise ValueError(f"{name} is {row.said}, and {field} is {wanted!r}: set {field}={instead}")


def _matrix_of(
    row: Format, parts: Mapping[str, Tensor], shape: tuple[int, int], name: Callable[[str], str]
) -> Tensor:
    """A matrix of its parts; `name`: of each of them, for errors."""
    with _named(name):
        return row.dequantise(parts, shape)


@contextlib.contextmanager
def _named(name: Callable[[str], str]) -> Iterator[None]:
    """Makes `ValueError`, with the name of the part, of what does not fit."""
    try:
        yield
    except Unfit as error:
        raise ValueError(f"{name(error.part)} {error.reason}") from None


def _in_order(rows: Tensor, interleaved: bool) -> Tensor:
    """Gate rows, then up rows, of rows that take turns."""
    return torch.cat((rows[0::2], rows[1::2])) if interleaved else rows


def _needed(shape: tuple[int, ...]) -> str:
    return f"this config needs it with shape {list(shape)}"


def _read(state_dict: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor that is not quantised."""
    if name not in state_dict:
        raise ValueError(f"{name} is missing; {_needed(shape)}")
    tensor = _take(state_dict, name)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; this config needs {list(shape)}")
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
