# SPDX-License-Identifier: Apache-2.0
"""What wraps a whole model for data parallelism leaves a layer's experts alone.

Wrappers make the parameters of all ranks equal, or cut them up, by name. Experts of equal names
differ by rank, so either would destroy them without a word. This file knows of a layer only which
of its tensors are experts.

| wrapper | why it leaves experts alone |
| --- | --- |
| `fully_shard`, `FullyShardedDataParallel` | they skip what is marked as `replicate`'s |
| `DistributedDataParallel`, `replicate` | its constructor is told to ignore them, see `_install` |
| `nn.DataParallel` | refused by the layer, which has one device |

`DistributedDataParallel` has no hook for this: its constructor reads a list of names, and only at
the module that is wrapped, which a layer deep inside does not know. So the constructor is wrapped,
once, when the first layer is made; it then writes that list, and leaves what stands there already.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

EXPERTS = ("w1", "w2", "b1", "b2", "w1_scale", "w2_scale", "w1_scale_2", "w2_scale_2")
"""The parameters of a layer that each rank holds for its own experts only."""

_layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def protect(layer: nn.Module) -> None:
    """Makes wrappers of models that hold `layer`, whenever they are made, leave its experts
    alone.
    """
    if not torch.distributed.is_available():
        return
    from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem

    registry = layer.__dict__.setdefault(REGISTRY_KEY, {})
    registry.setdefault("replicate", RegistryItem())
    _layers.add(layer)
    _install()


def without_mark(state: dict[str, Any]) -> dict[str, Any]:
    """A module's attributes but for what `protect` and wrappers have noted there, which means
    nothing in another process.
    """
    if not torch.distributed.is_available():
        return state
    from torch.distributed._composable.contract import REGISTRY_KEY

    return {name: value for name, value in state.items() if name != REGISTRY_KEY}


@functools.cache
def _install() -> None:
    from torch.nn.parallel import DistributedDataParallel

    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def init(self: Any, module: nn.Module, *args: Any, **options: Any) -> None:
        names = set(_names_of_experts(module))
        if names:
            names.update(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
        original(self, module, *args, **options)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]


def _names_of_experts(module: nn.Module) -> Iterator[str]:
    experts = {id(tensor) for layer in _layers for tensor in _experts(layer)}
    for name, tensor in module.named_parameters(remove_duplicate=False):
        if id(tensor) in experts:
            yield name


def _experts(layer: nn.Module) -> Iterator[Tensor]:
    for name in EXPERTS:
        tensor = layer._parameters.get(name)
        if tensor is not None:
            yield tensor
