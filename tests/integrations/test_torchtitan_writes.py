# SPDX-License-Identifier: Apache-2.0
"""However a program writes to the parameters of torchtitan's experts, a call reads what they hold.

The right value is the output of a module that was made with the same numbers, bit for bit, and for
optimizers float64.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from moeos import reference
from tests.integrations.stand_ins import Tensors, on_ranks
from tests.integrations.test_torchtitan import HIDDEN, INTERMEDIATE, TOP_K, built, call, config

Numbers = dict[str, Tensor]


def numbers_of(tensors: Tensors) -> Numbers:
    gate, up = tensors.w1.split(INTERMEDIATE, dim=1)
    return {"w1_EFD": gate.clone(), "w2_EDF": tensors.w2.clone(), "w3_EFD": up.clone()}


def _each(write: Callable[[nn.Parameter, Tensor], Any]) -> Callable[[nn.Module, Numbers], None]:
    """A way to write a module's parameters, of one to write a parameter."""

    def write_all(module: nn.Module, numbers: Numbers) -> None:
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                write(parameter, numbers[name])

    return write_all


def _data(parameter: nn.Parameter, numbers: Tensor) -> None:
    parameter.data = numbers.clone()


def _swap(parameter: nn.Parameter, numbers: Tensor) -> None:
    torch.utils.swap_tensors(parameter, nn.Parameter(numbers.clone()))


def _replace(module: nn.Module, numbers: Numbers) -> None:
    for name in numbers:
        setattr(module, name, nn.Parameter(numbers[name].clone()))


def _in_state_dict(module: nn.Module, numbers: Numbers) -> None:
    for name, tensor in module.state_dict().items():
        tensor.copy_(numbers[name])


def _from_vector(module: nn.Module, numbers: Numbers) -> None:
    parameters = list(module.parameters())
    vector = torch.cat([numbers[name].flatten() for name, _ in module.named_parameters()])
    assert parameters_to_vector(parameters).shape == vector.shape
    vector_to_parameters(vector, parameters)


def _from_dcp(module: nn.Module, numbers: Numbers) -> None:
    from torch.distributed import checkpoint

    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(dict(numbers), checkpoint_id=folder)
        checkpoint.load(module.state_dict(), checkpoint_id=folder)


def _from_safetensors(module: nn.Module, numbers: Numbers) -> None:
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as folder:
        save_file(module.state_dict(), Path(folder) / "own")  # as a program does
        save_file(numbers, Path(folder) / "new")
        module.load_state_dict(load_file(Path(folder) / "new"))


def _step(kind: Any, **options: Any) -> Callable[[nn.Module, Numbers], None]:
    """A step of an optimizer, whose gradients are the numbers."""

    def step(module: nn.Module, numbers: Numbers) -> None:
        optimizer = kind(module.parameters(), lr=0.1, **options)
        for name, parameter in module.named_parameters():
            parameter.grad = numbers[name].clone()
        optimizer.step()
        optimizer.zero_grad()

    return step


EXACT: dict[str, Callable[[nn.Module, Numbers], None]] = {
    "copy_": _each(lambda parameter, numbers: parameter.copy_(numbers)),
    "data.copy_": _each(lambda parameter, numbers: parameter.data.copy_(numbers)),
    "data =": _each(_data),
    "a view of one dimension": _each(lambda parameter, it: parameter.view(-1).copy_(it.view(-1))),
    "dlpack": _each(lambda parameter, it: torch.from_dlpack(parameter.detach()).copy_(it)),
    "numpy": _each(lambda parameter, it: parameter.detach().numpy().__setitem__(..., it.numpy())),
    "load_state_dict": lambda module, numbers: module.load_state_dict(numbers),
    "load_state_dict, assign": lambda module, numbers: module.load_state_dict(
        {name: tensor.clone() for name, tensor in numbers.items()}, assign=True
    ),
    "state_dict()[name].copy_": _in_state_dict,
    "vector_to_parameters": _from_vector,
    "swap_tensors": _each(_swap),
    "another parameter": _replace,
    "DCP": _from_dcp,
    "safetensors": _from_safetensors,
}
"""Ways after which a module's parameters are the numbers."""

CHANGING = {
    "add_": _each(lambda parameter, numbers: parameter.add_(numbers)),
    "AdamW": _step(torch.optim.AdamW, foreach=False, fused=False),
    "AdamW, foreach": _step(torch.optim.AdamW, foreach=True),
    "AdamW, fused": _step(torch.optim.AdamW, fused=True),
    "SGD, fused": _step(torch.optim.SGD, fused=True),
}
"""Ways after which they are others."""


@pytest.mark.parametrize(
    ("compiled", "one_module"),
    [(False, False), (True, True), pytest.param(True, False, marks=pytest.mark.nightly)],
    ids=["eager", "compiled once", "compiled for each way"],
)
def test_a_call_reads_what_was_written_before_between_and_after_calls(
    compiled: bool, one_module: bool
) -> None:
    """Of each way: before the first call, after a call, and after a backward; with one module for
    all ways another way's calls come before.
    """

    def live(rank: int) -> list[tuple[str, int]]:
        sets = [Tensors(config(), seed) for seed in range(4)]
        x, (ids, scores) = sets[0].draw(9, HIDDEN), sets[0].routing(9)

        def output(module: Any) -> Tensor:
            with torch.no_grad():
                return call(module, x, ids, scores)

        output(built(sets[0], {}))  # makes the experts, which all modules share
        wrong, experts = [], None
        for name, write in (EXACT | CHANGING).items():
            if experts is None or not one_module:
                torch._dynamo.reset()
                experts = built(sets[0], {})
                run = torch.compile(experts, backend="aot_eager") if compiled else experts
            inner = experts.inner_experts
            for time, tensors in enumerate(sets[1:]):
                numbers = numbers_of(tensors)
                write(inner, numbers)
                now = {key: one.detach().clone() for key, one in inner.named_parameters()}
                for key, one in numbers.items():
                    assert name in CHANGING or torch.equal(one, now[key])
                fresh = built(tensors, {})
                fresh.inner_experts.load_state_dict(now)
                if not torch.equal(output(run), output(fresh)):
                    wrong.append((name, time))
                if time == 1:
                    call(experts if one_module else run, x, ids, scores).sum().backward()
                    inner.zero_grad()
        return wrong

    assert on_ranks(live, 1) == [[]]


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0, "foreach": False}),
    "AdamW, foreach": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0, "foreach": True}),
    "AdamW, fused": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0, "fused": True}),
    "SGD, fused": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9, "fused": True}),
}


def test_steps_of_every_optimizer_are_those_of_float64() -> None:
    def live(rank: int) -> dict[str, float]:
        tensors = Tensors(config())
        batches = [(tensors.draw(24, HIDDEN), *tensors.routing(24)) for _ in range(3)]

        def steps(kind: Any, options: dict[str, Any]) -> dict[str, Tensor]:
            experts = built(tensors, {})
            optimizer = kind(experts.inner_experts.parameters(), **options)
            for x, ids, scores in batches:
                optimizer.zero_grad()
                call(experts, x, ids, scores).square().sum().backward()
                optimizer.step()
            return dict(experts.inner_experts.named_parameters())

        def right(kind: Any, options: dict[str, Any]) -> dict[str, Tensor]:
            stock = {name: nn.Parameter(one.double()) for name, one in numbers_of(tensors).items()}
            options = options | {"fused": False, "foreach": False}
            optimizer = kind(stock.values(), **options)
            for x, ids, scores in batches:
                optimizer.zero_grad()
                gate, up = (
                    torch.einsum("sd,efd->sef", x.double(), stock[name])
                    for name in ("w1_EFD", "w3_EFD")
                )
                between = nn.functional.silu(gate) * up
                of_all = torch.einsum("sef,edf->sed", between, stock["w2_EDF"])
                picked = of_all.gather(1, ids.long()[..., None].expand(-1, TOP_K, HIDDEN))
                (scores.double()[..., None] * picked).sum(1).square().sum().backward()
                optimizer.step()
            return stock

        errors = {}
        for name, how in OPTIMIZERS.items():
            found, expected, before = steps(*how), right(*how), numbers_of(tensors)
            for key, one in expected.items():
                moved = found[key].double() - before[key]
                errors[f"{name}: {key}"] = reference.relative_error(moved, one - before[key])
        return errors

    [errors] = on_ranks(live, 1)
    assert max(errors.values()) < 1e-4, errors


def test_calls_change_nothing_of_a_parameter_but_its_gradient() -> None:
    def live(rank: int) -> bool:
        tensors = Tensors(config())
        experts = built(tensors, {})
        inner = experts.inner_experts

        def state() -> list[Any]:
            return [
                (
                    *(name, id(one), type(one), one.shape, one.stride(), one.storage_offset()),
                    *(one.data_ptr(), one.untyped_storage().nbytes(), one._version),
                    *(sorted(vars(one)), one._backward_hooks, one._post_accumulate_grad_hooks),
                    *(one.requires_grad, one.is_leaf),
                    one.detach().clone().numpy().tobytes(),
                )
                for name, one in inner.named_parameters()
            ]

        before, modules = state(), (sorted(vars(inner)), sorted(inner._buffers))
        x, (ids, scores) = tensors.draw(9, HIDDEN), tensors.routing(9)
        for _ in range(3):
            call(experts, x, ids, scores).sum().backward()
        for weight in inner.parameters():
            assert weight.grad is not None
            assert weight.grad.stride() == weight.stride()
        assert (sorted(vars(inner)), sorted(inner._buffers)) == modules
        return state() == before

    assert on_ranks(live, 1) == [True]
