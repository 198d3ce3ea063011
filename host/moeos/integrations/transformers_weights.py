# SPDX-License-Identifier: Apache-2.0
"""The weights of an experts module of transformers, and how they lie.

transformers' modules say whether a matrix has a row for each output or for each input, and whether
gate and up rows follow one another or take turns. The kernels read all of these layouts, so a call
takes the module's parameters as they are, and nothing of them is kept from one call to the next.
Must not depend on worlds, calls, or what codes and scales mean.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from moeos.config.config import GateUp

_CODES, _SCALES = "_blocks", ("_scale_inv", "_scales")
"""Suffixes of a matrix's name: for codes whose name is not the matrix's, and for scales."""


class ModuleWeights(NamedTuple):
    """A module's tensors, in the order in which `moeos.Experts` takes them."""

    w1: Tensor
    w2: Tensor
    b1: Tensor | None
    b2: Tensor | None
    w1_scale: Tensor | None = None
    w2_scale: Tensor | None = None


class WeightLayout(NamedTuple):
    """Fields of a `MoEConfig` that say how w1 and w2 lie."""

    gate_up: GateUp
    transposed: bool


def names_of(module: Any) -> tuple[str, ...]:
    """The parameters of a module, in the order of `ModuleWeights`, without scales."""
    names = _matrices(module)
    biases = tuple(f"{name}_bias" for name in names) if module.has_bias else ()
    coded = hasattr(module, f"{names[0]}{_CODES}")
    return (*(f"{name}{_CODES}" if coded else name for name in names), *biases)


def scale_names_of(module: Any) -> tuple[str, ...]:
    """The names of the scales of both matrices; none for a module that is not quantized."""
    for names in _scales(module):
        if any(getattr(module, name, None) is not None for name in names):
            return names
    return ()


def names_of_missing_scales(module: Any) -> tuple[str, ...]:
    """The names of the scales that a module's codes lack."""
    of_bytes, of_blocks = _scales(module)
    return of_blocks if names_of(module)[0].endswith(_CODES) else of_bytes


def _scales(module: Any) -> list[tuple[str, ...]]:
    return [tuple(f"{name}{end}" for name in _matrices(module)) for end in _SCALES]


def weights_of(module: Any) -> ModuleWeights:
    """The module's tensors as they are. Each is read once: under a parametrization, such as that of
    PEFT's adapters, a read is a computation, which autograd notes and checkpointing repeats.
    """
    names = names_of(module)
    w1, w2 = (getattr(module, name) for name in names[:2])
    b1, b2 = (getattr(module, name) for name in names[2:]) if module.has_bias else (None, None)
    scales = (getattr(module, name, None) for name in scale_names_of(module))
    return ModuleWeights(w1, w2, b1, b2, *scales)


def layout_of(module: Any, weights: ModuleWeights) -> WeightLayout | None:
    """How w1 and w2 lie in memory, whatever their strides say first; None where no kernel reads
    them: their elements are apart, or each lies another way.
    """
    interleaved = module.has_gate and not module.is_concatenated
    gate_up: GateUp = "interleaved" if interleaved else "concatenated"
    for transposed in (module.is_transposed, not module.is_transposed):
        turned = transposed != module.is_transposed
        matrices = [one.transpose(1, 2) if turned else one for one in weights[:2]]
        if all(one.is_contiguous() for one in matrices):
            return WeightLayout(gate_up, transposed)
    return None


def _matrices(module: Any) -> tuple[str, str]:
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"
