# SPDX-License-Identifier: Apache-2.0
"""Tensors are known if nothing has changed that a check would see, and else all is checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moeos.call.known_tensors import KINDS, KnownTensors

MOST = 16
HIDDEN, TOP_K = 8, 2
Call = dict[str, Any]


class Named(Tensor):
    """A class of its own."""


class Mode(TorchDispatchMode):
    """Gets each operator."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def call_of(rows: int = 5) -> Call:
    parameter = torch.nn.Parameter(torch.zeros(4, HIDDEN, HIDDEN), requires_grad=False)
    return {
        "rows": torch.zeros(rows, HIDDEN),
        "ids": torch.zeros(rows, TOP_K, dtype=torch.int32),
        "weights": torch.zeros(rows, TOP_K),
        "tokens": torch.zeros(1, dtype=torch.int32),
        "out": torch.zeros(rows, HIDDEN),
        "own": (parameter, None, torch.zeros(4, HIDDEN, 3), None),
    }


def learned(call: Call) -> KnownTensors:
    known = KnownTensors([True, False, True, False])
    known.learn(**call)
    assert known.are(MOST, **call)
    return known


def test_other_tensors_of_as_many_rows_and_of_more_or_fewer_are_known() -> None:
    known = learned(call_of())
    for rows in (5, 1, 0, 2, MOST):
        assert known.are(MOST, **call_of(rows))
    assert not known.are(MOST, **call_of(MOST + 1))
    assert known.are(2 * MOST, **call_of(2 * MOST))


def rows_of(strides: tuple[int, int], rows: int = 5) -> Tensor:
    return torch.zeros(999).as_strided((rows, HIDDEN), strides)


CHANGES: dict[str, dict[str, Callable[[Tensor], Any]]] = {
    "rows": {
        "another dtype": Tensor.double,
        "another width": lambda t: t[:, 1:].contiguous(),
        "gaps": lambda t: rows_of((HIDDEN + 1, 1)),
        "transposed": lambda t: rows_of((1, 5)),
        "another device": lambda t: t.to("meta"),
        "a class of its own": lambda t: t.as_subclass(Named),
        "a parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
        "more rows": lambda t: torch.zeros(6, HIDDEN),
        "one dimension more": lambda t: t[None],
        "none": lambda t: None,
        "a list": lambda t: [1],
        "a gradient": lambda t: t.clone().requires_grad_(),
        "sparse": Tensor.to_sparse,
        "made in inference mode": torch.inference_mode()(torch.clone),
        "a lazy negative": torch._neg_view,
        "zeros without memory": lambda t: torch._efficientzerotensor(t.shape),
        "functional": torch._to_functional_tensor,
    },
    "ids": {
        "more rows": lambda t: torch.zeros(6, TOP_K, dtype=torch.int32),
        "other width": lambda t: torch.zeros(5, 3, dtype=torch.int32),
        "another dtype": Tensor.float,
        "none": lambda t: None,
    },
    "weights": {
        "more rows": lambda t: torch.zeros(6, TOP_K),
        "none": lambda t: None,
        "a gradient": lambda t: t.clone().requires_grad_(),
    },
    "tokens": {
        "another dtype": Tensor.long,
        "two": lambda t: torch.zeros(2, dtype=torch.int32),
        "none": lambda t: None,
    },
    "out": {
        "more rows": lambda t: torch.zeros(6, HIDDEN),
        "gaps": lambda t: rows_of((HIDDEN + 1, 1)),
        "another dtype": Tensor.half,
        "none": lambda t: None,
    },
    "own": {
        "another shape": lambda t: (t[0][:3], *t[1:]),
        "transposed": lambda t: (t[0].transpose(1, 2), *t[1:]),
        "another dtype": lambda t: (t[0].half(), *t[1:]),
        "missing": lambda t: (None, *t[1:]),
        "a list": lambda t: (*t[:2], [1], None),
        "one that must not be": lambda t: (*t[:3], torch.zeros(1)),
        "another that must not be": lambda t: (t[0], torch.zeros(1), *t[2:]),
        "on another device": lambda t: (*t[:2], t[2].to("meta"), None),
    },
}


@pytest.mark.parametrize(("name", "change"), [(n, c) for n, of in CHANGES.items() for c in of])
def test_what_has_changed_is_not_known(name: str, change: str) -> None:
    call = call_of()
    known = learned(call)
    assert not known.are(MOST, **{**call, name: CHANGES[name][change](call[name])})
    assert known.are(MOST, **call)


IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "data of another dtype": lambda t: setattr(t, "data", t.data.view(torch.int32)),
    "data transposed": lambda t: setattr(t, "data", t.data.transpose(1, 2)),
    "transposed": lambda t: t.transpose_(1, 2),
    "resized": lambda t: t.resize_(3, HIDDEN, HIDDEN),
    "set": lambda t: t.set_(torch.zeros(7)),
    "in inference mode": torch.inference_mode()(lambda t: t.transpose_(1, 2)),
    "a gradient": lambda t: t.requires_grad_(),
}


@pytest.mark.parametrize("change", IN_PLACE)
def test_what_has_changed_in_place_is_not_known(change: str) -> None:
    call = call_of()
    known = learned(call)
    IN_PLACE[change](call["own"][0])
    assert not known.are(MOST, **call)


def test_what_acts_on_operators_is_no_part_of_what_is_known() -> None:
    call = call_of()
    known = learned(call)
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(known.are(MOST, **{**call, "rows": x}))
        return x * 1

    with Mode():
        look(call["rows"])
    with torch.inference_mode():
        look(call["rows"])
    torch.func.vmap(look)(torch.zeros(3, 5, HIDDEN))
    torch.func.jvp(look, (call["rows"],), (call["rows"],))
    torch.func.functionalize(look)(call["rows"])
    assert seen == [False] * 5
    assert look(call["rows"]) is not None
    assert seen[-1]


def test_a_gradient_is_wanted_only_where_gradients_are_kept() -> None:
    call = call_of()
    call["own"][0].requires_grad_()
    with torch.no_grad():
        known = learned(call)
    assert not known.are(MOST, **call)
    with torch.no_grad():
        assert known.are(MOST, **call)
    with torch.no_grad():
        call["own"][0].requires_grad_(False)
        known = learned(call)
        call["own"][0].requires_grad_()
    assert not known.are(MOST, **call)


def test_a_single_row_of_any_stride_says_nothing_of_more() -> None:
    call = {**call_of(1), "rows": rows_of((HIDDEN + 1, 1), 1)}
    known = KnownTensors([True, False, True, False])
    known.learn(**call)
    assert not known.are(MOST, **{**call_of(5), "rows": rows_of((HIDDEN + 1, 1))})


def test_so_many_kinds_of_calls_are_known_and_the_oldest_is_forgotten() -> None:
    known = KnownTensors([True, False, True, False])
    calls: list[Call] = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64):
        calls.append({**call_of(), "weights": torch.zeros(5, TOP_K, dtype=dtype)})
        known.learn(**calls[-1])
    assert [known.are(MOST, **call) for call in calls] == [False] + [True] * KINDS


def test_without_the_function_of_pytorch_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    known = KnownTensors([True, False, True, False])
    known.learn(**call_of())
    assert not known.are(MOST, **call_of())
