# SPDX-License-Identifier: Apache-2.0
"""What wraps a whole model for data parallelism leaves a layer's experts alone.

Wrappers make the parameters of all ranks equal, or cut them up, by name. Experts of equal names
differ by rank, so either would destroy them without a word. This file knows of a layer only which
of its tensors are experts, and how many ranks share them.

| wrapper | why it leaves experts alone |
| --- | --- |
| `fully_shard`, `FullyShardedDataParallel` | they skip what is marked as `replicate`'s |
| `DistributedDataParallel`, `replicate` | its constructor is told to ignore them, see `_install` |
| `nn.DataParallel` | refused by the layer, which has one device |
| `ZeroRedundancyOptimizer` | refused in its step, which sends whatever it was given |

`DistributedDataParallel` has no hook for this: its constructor reads a list of names, and only at
the module that is wrapped, which a layer deep inside does not know. So the constructor is wrapped,
once, when the first layer is made; it then writes that list, and leaves what stands there already.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from moeos import optimizers
from moeos.optimizers import Held

if TYPE_CHECKING:
    from moeos.layer import MoELayer

EXPERTS = ("w1", "w2", "b1", "b2", "w1_scale", "w2_scale", "w1_scale_2", "w2_scale_2")
"""The parameters of a layer that each rank holds for its own experts only."""

_SHARED = tuple(f"shared_{name}" for name in EXPERTS if not name.startswith("b"))
"""Those of the shared experts, which have no biases."""

_layers: weakref.WeakValueDictionary[int, MoELayer] = weakref.WeakValueDictionary()  # by id


def protect(layer: MoELayer) -> None:
    """Makes wrappers of models that hold `layer`, whenever they are made, leave its experts
    alone.
    """
    _layers[id(layer)] = layer
    if not torch.distributed.is_available():
        return
    from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem

    registry = layer.__dict__.setdefault(REGISTRY_KEY, {})
    registry.setdefault("replicate", RegistryItem())
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
        names = set(_names_left_alone(module))
        if names:
            names.update(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
        original(self, module, *args, **options)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(_refuse_zero)
    register_optimizer_step_pre_hook(optimizers.before_step)
    optimizers.install(experts_held)


def _names_left_alone(module: nn.Module) -> Iterator[str]:
    left = {*experts_held(), *_shared_codes()}
    for name, tensor in module.named_parameters(remove_duplicate=False):
        if id(tensor) in left:
            yield name


def _shared_codes() -> Iterator[int]:
    """What shared experts have in a format, by `id`: it is equal on all ranks and never trained,
    and gloo would not send 8-bit floats.
    """
    for layer in layers():
        if layer.cfg.shared_weight_format is not None:
            for name in _SHARED:
                tensor = layer._tensor_of(name)
                if tensor is not None:
                    yield id(tensor)


def layers() -> list[MoELayer]:
    """All that somebody holds, and copies of them."""
    references = _layers.valuerefs()  # a list: other threads make layers
    return [layer for one in references if (layer := one()) is not None]


def experts_held() -> dict[int, Held]:
    """The parameters of all layers' experts, by `id`."""
    return {
        id(tensor): Held(layer, name)
        for layer in layers()
        for name in EXPERTS
        if (tensor := layer._tensor_of(name)) is not None
    }


def _refuse_zero(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Raises, before its step, for a `ZeroRedundancyOptimizer` that was given experts of which
    ranks hold different ones.
    """
    # Nobody can hold one who has not imported it.
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    kind = getattr(module, "ZeroRedundancyOptimizer", None)
    if kind is None or not isinstance(optimizer, kind):
        return
    held = experts_held()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            holder = held.get(id(parameter))
            if holder is not None and holder.layer._place[1] > 1:
                raise RuntimeError(
                    f"ZeroRedundancyOptimizer was given {holder.name} of a MoELayer, of which each "
                    "rank holds other experts, and would send one rank's to all: pass it all other "
                    "parameters, such as [p for p in model.parameters() if p.requires_grad] where "
                    "experts are frozen"
                )
