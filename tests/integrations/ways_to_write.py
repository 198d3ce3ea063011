# SPDX-License-Identifier: Apache-2.0
"""Every way in which programs of PyTorch write to a module's parameters.

A way gets a module and new numbers by the parameters' names. Most ways of PyTorch tell nobody that
they wrote, so an adapter that keeps a copy, an order of its own or an address computes with old
numbers afterwards. Holds no test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

Way = Callable[[nn.Module, Mapping[str, Tensor], Path], None]
WAYS: dict[str, Way] = {}


def way(function: Way) -> Way:
    WAYS[function.__name__] = function
    return function


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters())


@way
def copy(module: nn.Module, new: Mapping[str, Tensor], folder: Path) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(new[name])


@way
def data_copy(module: nn.Module, new: Mapping[str, Tensor], folder: Path) -> None:
    for name, parameter in module.named_parameters():
        parameter.data.copy_(new[name])


@way
def data_assignment(module: nn.Module, new: Mapping[str, Tensor], folder: Path) -> None:
    for name, parameter in module.named_parameters():
        parameter.data = new[name].clone()


@way
def add(module: nn.Module, new: Mapping[str, Tensor], folder: Path) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.add_(new[name] - parameter)


def _step(module: nn.Module, new: Mapping[str, Tensor], optimizer: Any) -> None:
    wanted = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    module.requires_grad_(True)
    made = optimizer(module.parameters())
    for _ in range(2):
        for name, parameter in module.named_parameters():
            parameter.grad = (parameter.detach() - new[name]).contiguous()
        made.step()
    for name, parameter in module.named_parameters():
        parameter.grad = None
        parameter.requires_grad_(wanted[name])


@way
def adamw_fused(module: nn.Module, new: Mapping[str, Tensor], folder: Path) -> None:
    _step(module, new, lambda own: torch.optim.AdamW(own, lr=0.1, fused=True))


@way
def adamw_foreach(module: nn.Module, new: Mapping[str, Tensor], folder: Path) -> None:
    _step(module, new, lambda own: torch.optim.AdamW(own, lr=0.1, foreach=True))


@way
def adamw_plain(module: nn.Module, new: Mapping[str, Tensor], folder: Path) -> None:
    _step(module, new, lambda own: torch.optim.AdamW(own, lr=0.1, foreach=False))


@way
def sgd_fused(module: nn.Module, new: Mapping[str, Tensor], folder: Path) -> None:
    _step(module, new, lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9, fused=True))


@way
def load_state_dict(module: nn.Module, new: Mapping[str, Tensor], folder: Path) -> None:
    module.load_state_dict(dict(new))


@way
def load_state_dict_assigned(module: nn.Module, new: Mapping[str, Tensor], folder: Path) -> None:
    module.load_state_dict({name: one.clone() for name, one in new.items()}, assign=True)
    module.requires_grad_(False)


@way
def state_dict_copy(module: nn.Module, new: Mapping[str, Tensor], folder: Path) -> None:
    for name, tensor in module.state_dict().items():
        tensor.copy_(new[name])


@way
def vector_to_parameters(module: nn.Module, new: Mapping[str, Tensor], folder: Path) -> None:
    own = parameters_of(module)
    vector = torch.cat([new[name].reshape(-1) for name in own])
    nn.utils.vector_to_parameters(vector, own.values())


@way
def swap_tensors(module: nn.Module, new: Mapping[str, Tensor], folder: Path) -> None:
    for name, parameter in module.named_parameters():
        other = nn.Parameter(new[name].clone(), requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, other)


@way
def another_parameter(module: nn.Module, new: Mapping[str, Tensor], folder: Path) -> None:
    for name in parameters_of(module):
        inner, _, last = name.rpartition(".")
        owner = module.get_submodule(inner)
        setattr(owner, last, nn.Parameter(new[name].clone(), requires_grad=False))


@way
def dlpack(module: nn.Module, new: Mapping[str, Tensor], folder: Path) -> None:
    for name, parameter in module.named_parameters():
        torch.from_dlpack(parameter.detach()).copy_(new[name])


@way
def numpy(module: nn.Module, new: Mapping[str, Tensor], folder: Path) -> None:
    for name, parameter in module.named_parameters():
        parameter.detach().numpy()[...] = new[name].numpy()


@way
def distributed_checkpoint(module: nn.Module, new: Mapping[str, Tensor], folder: Path) -> None:
    dcp.save(dict(new), checkpoint_id=folder, no_dist=True)
    dcp.load(module.state_dict(), checkpoint_id=folder, no_dist=True)


@way
def safetensors_file(module: nn.Module, new: Mapping[str, Tensor], folder: Path) -> None:
    safetensors = __import__("safetensors.torch").torch
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.save_file(module.state_dict(), folder / "own")  # as a program does
    safetensors.save_file(dict(new), folder / "new")
    module.load_state_dict(safetensors.load_file(folder / "new"))


@way
def accelerate_offload(module: nn.Module, new: Mapping[str, Tensor], folder: Path) -> None:
    accelerate = __import__("accelerate")
    copy(module, new, folder)
    accelerate.cpu_offload(module, torch.device("cpu"))


def _adapted(module: nn.Module, names: list[str]) -> Any:
    """PEFT's model around a module whose matrices `names` have adapters that are not zero."""
    peft = __import__("peft")
    around = nn.ModuleDict({"experts": module})
    torch.manual_seed(3)
    wanted = peft.LoraConfig(
        r=2, target_modules=[], init_lora_weights=False, target_parameters=names
    )
    return peft.get_peft_model(around, wanted)


@way
def peft_merge(module: nn.Module, new: Mapping[str, Tensor], folder: Path) -> None:
    copy(module, new, folder)
    matrices = [f"experts.{name}" for name, one in new.items() if one.dim() == 3]
    made = _adapted(module, matrices)
    made.merge_adapter()
    module.requires_grad_(False)


@way
def peft_unmerge(module: nn.Module, new: Mapping[str, Tensor], folder: Path) -> None:
    copy(module, new, folder)
    matrices = [f"experts.{name}" for name, one in new.items() if one.dim() == 3]
    made = _adapted(module, matrices)
    made.merge_adapter()
    made.unmerge_adapter()
    module.requires_grad_(False)


NEEDS = {"accelerate_offload": "accelerate", "peft_merge": "peft", "peft_unmerge": "peft"}
"""The package that a way needs."""


def numbers_of(module: nn.Module) -> dict[str, Tensor]:
    """What the module's parameters hold now, wherever accelerate keeps them."""
    hook: Any = getattr(module, "_hf_hook", None)
    kept: Any = [getattr(one, "weights_map", None) for one in getattr(hook, "hooks", [])]
    weights: Any = next((one for one in kept if one is not None), None)
    return {
        name: (weights[name] if one.is_meta else one).detach().clone()
        for name, one in module.named_parameters()
    }
