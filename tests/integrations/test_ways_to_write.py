# SPDX-License-Identifier: Apache-2.0
"""A call computes with what the parameters hold at that time, whichever way it was written.

After each way, at each time, the output has the bits of a fresh module with the same numbers; and
calls leave parameters as they were.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moeos.integrations.transformers as adapter
from moeos.config import reference
from tests.integrations.test_transformers import aria, by, gpt_oss, qwen3, tokens_for
from tests.integrations.ways_to_write import NEEDS, WAYS, numbers_of
from tests.nightly import at_night

SUBJECTS: dict[str, Callable[[], Any]] = {"qwen3": qwen3, "gpt_oss": gpt_oss, "aria": aria}
TIMES = {"before calls": 0, "between calls": 1, "after several calls": 3}


@pytest.fixture(autouse=True)
def registered() -> None:
    adapter.register(max_tokens=64)


def called(module: Any, tokens: tuple[Tensor, ...], compiled: Any = None) -> Tensor:
    module.config._experts_implementation = "moeos"
    with torch.no_grad():
        y: Tensor = (module if compiled is None else compiled)(*tokens)
    return y


def new_numbers(module: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.randn(one.shape, generator=generator, dtype=one.dtype) * 0.1
        for name, one in module.named_parameters()
    }


def require(way: str) -> None:
    package = NEEDS.get(way)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


@pytest.mark.parametrize("compiled", [False, at_night(True)], ids=["eager", "compiled"])
@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("way", WAYS)
def test_a_call_after_a_write_has_the_bits_of_a_fresh_module_with_the_same_numbers(
    way: str, subject: str, compiled: bool, tmp_path: Path
) -> None:
    require(way)
    if compiled and way == "swap_tensors":
        pytest.skip("PyTorch swaps no tensor that the guards of a graph watch")
    for time, calls in TIMES.items():
        module, fresh = SUBJECTS[subject](), SUBJECTS[subject]()
        tokens = tokens_for(module)
        torch._dynamo.reset()
        graph = torch.compile(module, backend="eager") if compiled else None
        for _ in range(calls):
            before = called(module, tokens, graph)
        WAYS[way](module, new_numbers(module), tmp_path / time)
        fresh.load_state_dict(numbers_of(module))
        wanted = called(fresh, tokens)
        for _ in range(2):
            assert torch.equal(called(module, tokens, graph), wanted), time
        assert reference.relative_error(wanted, by(fresh, "eager", *tokens)) <= 1e-5
        if calls:
            assert not torch.equal(before, wanted), "the way wrote nothing"


def state_of(parameter: nn.Parameter) -> tuple[Any, ...]:
    storage = parameter.untyped_storage()
    return (
        *(id(parameter), type(parameter), parameter.shape, parameter.stride(), parameter.dtype),
        *(parameter.data_ptr(), storage.data_ptr(), storage.nbytes(), parameter.storage_offset()),
        *(parameter.requires_grad, parameter._version, dict(vars(parameter))),
    )


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("subject", SUBJECTS)
def test_register_and_calls_leave_parameters_and_the_module_as_they_were(
    subject: str, trains: bool
) -> None:
    module = SUBJECTS[subject]().requires_grad_(trains)
    tokens = tokens_for(module)
    numbers = numbers_of(module)
    before = {name: state_of(one) for name, one in module.named_parameters()}
    kind, state, hooks = type(module), list(module.state_dict()), len(module._forward_pre_hooks)
    attributes, of_class = {**vars(module)}, {**vars(kind)}
    adapter.register(max_tokens=64)
    module.config._experts_implementation = "moeos"
    for _ in range(3):
        y = module(*tokens)
        if trains:
            torch.autograd.grad(y.sum(), list(module.parameters()))
    assert {name: state_of(one) for name, one in module.named_parameters()} == before
    for name, one in module.named_parameters():
        assert torch.equal(one, numbers[name]), name
    assert type(module) is kind
    assert dict(vars(kind)) == of_class
    found = {**vars(module)}
    found.pop(adapter._READY)  # the one attribute that moeos sets, and not of any parameter
    assert found == attributes
    assert list(module.state_dict()) == state
    assert len(module._forward_pre_hooks) == hooks
    assert not list(module.buffers())
