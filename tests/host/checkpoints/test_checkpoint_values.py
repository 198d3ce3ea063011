# SPDX-License-Identifier: Apache-2.0
"""Values of a state dict that are no tensors with memory are refused by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moeos.checkpoints import load_block
from tests.layers import config, draw_weights

CFG = config()
WEIGHTS = draw_weights(CFG)
NAME = "m.experts.3.w1.weight"


def block() -> dict[Any, Any]:
    """Of Mixtral's names."""
    found: dict[Any, Any] = {"m.gate.weight": WEIGHTS.gate}
    for expert, (w1, w2) in enumerate(zip(WEIGHTS.w1, WEIGHTS.w2, strict=True)):
        parts = {"w1": w1[: CFG.intermediate], "w3": w1[CFG.intermediate :], "w2": w2}
        found |= {f"m.experts.{expert}.{name}.weight": part for name, part in parts.items()}
    return found


def freed(tensor: Tensor) -> Tensor:
    copy = tensor.clone()
    copy.untyped_storage().resize_(0)
    return copy


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda t: None, TypeError, "is a NoneType; it must be a torch.Tensor"),
        (Tensor.numpy, TypeError, "is a ndarray; it must be a torch.Tensor"),
        (lambda t: t.to("meta"), ValueError, "has no values.*pass tensors that were loaded"),
        (Tensor.to_sparse, ValueError, r"has layout torch\.sparse_coo.*to_dense"),
        (lambda t: torch.nested.nested_tensor([t]), ValueError, "is a nested tensor"),
        (freed, ValueError, "reaches to byte"),
        (torch._to_functional_tensor, ValueError, "reaches to byte"),
    ],
    ids=["None", "NumPy's", "meta", "sparse", "nested", "freed", "functional"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_value_that_cannot_be_read_is_named(
    change: Callable[[Tensor], Any], error: type[Exception], words: str
) -> None:
    tensors = block()
    tensors[NAME] = change(tensors[NAME])
    with pytest.raises(error, match=f"^{NAME} {words}"):
        load_block(CFG, tensors, "m.", 0, 1)


def test_lazy_values_are_read_as_what_they_stand_for() -> None:
    tensors = block()
    tensors[NAME] = torch._neg_view(-tensors[NAME])
    assert torch.equal(load_block(CFG, tensors, "m.", 0, 1)["w1"], WEIGHTS.w1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((None, "m."), "state_dict is a NoneType; it must be a mapping"),
        ((b"folder", "m."), "state_dict is a bytes; it must be a mapping.* a string"),
        ((block(), None), "prefix is None; it must be a string"),
        (({3: WEIGHTS.gate}, "m."), "a name in the state_dict is 3; it must be a string"),
    ],
)
def test_arguments_of_other_types_are_named(arguments: tuple[Any, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        load_block(CFG, *arguments, 0, 1)
