# SPDX-License-Identifier: Apache-2.0
"""Makes wrappers of a whole model for data parallelism leave a layer's experts alone.

Wrappers make the parameters of all ranks equal, or cut them up, by name. Experts of equal names
differ by rank, so either would silently destroy them. This file must depend on nothing of a layer
but which of its tensors differ by rank, and how many ranks share them.

| wrapper | how it leaves experts alone |
| --- | --- |
| `fully_shard`, and the `replicate` that is built on it | it does not find them |
| `FullyShardedDataParallel` | it gets them as ignored | | `DistributedDataParallel`, and the
`replicate` that is built on it | likewise, by name | | `nn.DataParallel` | refused by the layer,
which has one device | | `ZeroRedundancyOptimizer` | refused in its step, which sends whatever it
was given |

Weights that a module passes to `Experts` are unknown before a call. A wrapper that takes tensors of
their shape warns, and so does a call with what a wrapper averages.

No wrapper has a hook for this: each reads what to ignore from the module that is wrapped, which a
layer deep inside does not know. So functions of the wrappers are wrapped, once, and still call the
originals.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from moeos.layer import optimizers
from moeos.layer.optimizers import Held
from moeos.partition import sharding

if TYPE_CHECKING:
    from moeos.layer.experts import Experts
    from moeos.layer.layer import MoELayer
    from moeos.world.world import World

EXPERTS = ("w1", "w2", "b1", "b2", "w1_scale", "w2_scale", "w1_scale_2", "w2_scale_2")
"""The parameters of a layer that each rank holds for its own experts only."""

_SHARED = tuple(f"shared_{name}" for name in EXPERTS if not name.startswith("b"))
"""The parameters of the shared experts, which have no biases."""

_FSDP = "torch.distributed.fsdp."

_layers: weakref.WeakValueDictionary[int, MoELayer] = weakref.WeakValueDictionary()  # by id
_told: weakref.WeakSet[World] = weakref.WeakSet()
"""Worlds that have already warned of their replicas."""

_watched: weakref.WeakSet[Experts] = weakref.WeakSet()
"""Experts with the caller's weights, for which a warning may still be due."""

_averaged = WeakIdKeyDictionary()
"""The parameters that a `DistributedDataParallel` makes equal, and on which ranks."""


class _Registry(dict[str, Any]):
    """What composable APIs note at a module, as PyTorch keeps it there.

    `fully_shard` and `FullyShardedDataParallel` look into it before they ask for parameters. That
    is when they are wrapped: importing them takes a second, which only programs that use them pay.
    """

    def __contains__(self, name: object) -> bool:
        _install_fsdp()
        return super().__contains__(name)


def protect(layer: MoELayer) -> None:
    """Makes wrappers of models that hold `layer`, whenever they are made, leave its experts
    alone.
    """
    _layers[id(layer)] = layer
    if not dist.is_available():
        return
    from torch.distributed._composable.contract import REGISTRY_KEY

    layer.__dict__.setdefault(REGISTRY_KEY, _Registry())
    _install()


def watch(experts: Experts) -> None:
    """Makes wrappers made from now on warn of weights that a module passes to `experts`."""
    if dist.is_available() and experts.world.size > 1:
        _watched.add(experts)
        _install()
        with contextlib.suppress(RuntimeError):  # layers raise it when they are wrapped
            _install_fsdp()


def warn_of_averaged(experts: Experts, weights: Iterable[torch.Tensor | None]) -> None:
    """Warns, once, where a wrapper averages weights of a call over ranks with other experts."""
    if experts not in _watched:
        return
    if any(one is not None and _mixes(experts, _averaged.get(one, ())) for one in weights):
        _warn_of_own("DistributedDataParallel", experts, "weights that are passed to Experts")


def without_mark(state: dict[str, Any]) -> dict[str, Any]:
    """A module's attributes but for what `protect` and wrappers have noted there, which means
    nothing in another process.
    """
    if not dist.is_available():
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
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        taken = {name: one for name, one in module.named_parameters() if name not in ignored}
        original(self, module, *args, **options)
        ranks = dist.get_process_group_ranks(self.process_group)
        _averaged.update(dict.fromkeys(taken.values(), tuple(ranks)))
        _look_for_own("DistributedDataParallel", [module], taken, ranks)
        _tell_of_replicas("DistributedDataParallel", module, ranks)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(_refuse_zero)
    register_optimizer_step_pre_hook(optimizers.before_step)
    optimizers.install(experts_held)


def _names_left_alone(module: nn.Module) -> Iterator[str]:
    """The names by which `DistributedDataParallel` asks for what ranks hold alone, or what gloo
    cannot send.

    Experts of a world of one rank lie whole on each process, and are as any parameter.
    """
    left = _ids_of_experts(layer for layer in layers() if layer._place[1] > 1)
    left |= _ids_of_experts(layer for layer in layers() if layer.cfg.weight_format is not None)
    left |= _ids_of_shared(layers())
    for name, tensor in module.named_parameters(remove_duplicate=False):
        if id(tensor) in left:
            yield name
            if "." not in name:  # its reducer puts the root's name before it, which is empty
                yield f".{name}"


def _install_fsdp() -> None:
    fully = ("_fully_shard._fsdp_init", "_fully_shard._fully_shard")  # by version
    for where in _having("_get_managed_states", *fully):
        _wrap(where, "_get_managed_states", _without_experts)
    for where in _having("_get_ignored_params", "_init_utils"):
        _wrap(where, "_get_ignored_params", _with_experts)
    for where in _having("_init_param_handle_from_module", "fully_sharded_data_parallel"):
        _wrap(where, "_init_param_handle_from_module", _with_views)
    for where in _having("FSDPParamGroup", "_fully_shard._fsdp_param_group"):
        _wrap(where.FSDPParamGroup, "__init__", _with_mesh)


def _having(name: str, *places: str) -> list[Any]:
    """The modules in `_FSDP` that have `name`. Raises `RuntimeError` if one has been imported and
    none has `name`.
    """
    found = [sys.modules.get(_FSDP + place) for place in places]
    there = [one for one in found if one is not None and not _is_being_imported(one)]
    having = [one for one in there if hasattr(one, name)]
    if there and not having:
        raise RuntimeError(
            f"torch {torch.__version__} has no {name} in {_FSDP}{places[0]}, by which moeos keeps "
            "FullyShardedDataParallel and fully_shard from cutting up experts: use a torch or a "
            "moeos of another version, or DistributedDataParallel"
        )
    return having


def _is_being_imported(module: Any) -> bool:
    """Whether another thread is importing it: a wrapper needs the module only after its import."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _wrap(where: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    """Wraps a function of a class, or of a module, by its name."""
    function = getattr(where, name)
    if not hasattr(function, "spares_experts"):
        made = functools.wraps(function)(wrapper(function))
        made.spares_experts = True  # type: ignore[attr-defined]
        setattr(where, name, made)


def _without_experts(found: Any) -> Any:
    """Wraps the function that finds the parameters and buffers that `fully_shard` cuts."""

    def find(*args: Any, **options: Any) -> tuple[list[nn.Parameter], list[torch.Tensor]]:
        parameters, buffers = found(*args, **options)
        left = _ids_of_experts(layers()) | _ids_of_shared(layers())
        return [one for one in parameters if id(one) not in left], buffers

    return find


def _with_experts(found: Any) -> Any:
    """Wraps the function that finds the parameters that `FullyShardedDataParallel` ignores."""

    def find(module: nn.Module, *args: Any, **options: Any) -> set[nn.Parameter]:
        ignored: set[nn.Parameter] = found(module, *args, **options)
        left = _ids_of_experts(layers()) | _ids_of_shared(layers())
        return ignored | {one for one in module.parameters() if id(one) in left}

    return find


def _with_views(made: Any) -> Any:
    """Wraps the function that makes a flat parameter of those that `FullyShardedDataParallel`
    found.
    """

    def make(state: Any, module: nn.Module, *args: Any, **options: Any) -> None:
        if not state._use_orig_params:
            _require_parameters(module, state._ignored_params)
        groups = [state.process_group]
        if "HYBRID" in state.sharding_strategy.name:  # which reduces over both
            groups.append(state._inter_node_pg)
        ranks = [dist.get_process_group_ranks(group) for group in groups]
        _tell_of_replicas("FullyShardedDataParallel", module, *ranks)
        taken = _named([module], set(module.parameters()) - state._ignored_params)
        _look_for_own("FullyShardedDataParallel", [module], taken, set().union(*ranks))
        made(state, module, *args, **options)

    return make


def _require_parameters(module: nn.Module, ignored: set[nn.Parameter]) -> None:
    """Raises `ValueError` where views would take the place of a layer's parameters, such as those
    of its gate or of shared experts.
    """
    ours = {one for layer in layers() for one in layer.parameters()}
    if (ours - ignored).intersection(module.parameters()):
        raise ValueError(
            "FullyShardedDataParallel with use_orig_params=False makes plain tensors of a "
            "MoELayer's parameters, which its calls would not find: pass use_orig_params=True, "
            "or use fully_shard"
        )


def _with_mesh(made: Any) -> Any:
    """Wraps what `fully_shard` makes of the parameters of modules, and of a mesh."""

    def init(
        self: Any, parameters: Any, modules: Any, mesh_info: Any, *args: Any, **options: Any
    ) -> None:
        ranks = mesh_info.mesh.mesh.flatten().tolist()
        _look_for_own("fully_shard", modules, _named(modules, parameters), ranks)
        made(self, parameters, modules, mesh_info, *args, **options)
        for module in modules:
            _tell_of_replicas("fully_shard", module, ranks)

    return init


def _named(
    modules: Iterable[nn.Module], parameters: Iterable[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The parameters by the names that modules have for them."""
    ours = {id(one) for one in parameters}
    every = (pair for module in modules for pair in module.named_parameters())
    return {name: one for name, one in every if id(one) in ours}


def _mixes(experts: Experts, ranks: Iterable[int]) -> bool:
    """Whether ranks of torch.distributed have unlike weights of these experts, as far as known."""
    world = experts.world
    peers = sharding.ranks_of(world.group, (world.rank, world.size))
    return len(set(ranks) if peers is None else set(ranks).intersection(peers)) > 1


def _look_for_own(
    wrapper: str,
    modules: Iterable[nn.Module],
    taken: Mapping[str, torch.Tensor],
    ranks: Iterable[int],
) -> None:
    """Warns of parameters that a wrapper has `taken`, and makes equal on these ranks, where
    `Experts` in these modules compute with weights of that shape.
    """
    layers_own = _ids_of_experts(layers())
    inside = [part for module in modules for part in module.modules()]
    for experts in list(_watched):
        if not _mixes(experts, ranks):
            continue
        if not any(value is experts for part in inside for value in vars(part).values()):
            continue
        shapes = [(one.shape, one.dtype) for one in experts.own_matrices]
        alike = [
            name
            for name, one in taken.items()
            if (one.shape, one.dtype) in shapes and id(one) not in layers_own
        ]
        if alike:
            _warn_of_own(wrapper, experts, ", ".join(alike))


def _warn_of_own(wrapper: str, experts: Experts, what: str) -> None:
    _watched.discard(experts)
    warnings.warn(
        f"{wrapper} takes {what} for what all ranks have alike, and makes it so. But of weights of "
        f"{experts!r} each rank has its own, and would get a mixture of different experts: tell "
        "the wrapper to leave them alone, as docs/training.md says "
        "(_set_params_and_buffers_to_ignore_for_model, ignored_params, ignored_states)",
        stacklevel=4,
    )


def _tell_of_replicas(wrapper: str, module: nn.Module, *axes: list[int]) -> None:
    """Warns, once a world, of experts that train in several worlds, if the wrapper, which has left
    them alone, reduces over more ranks than there are in one. `axes`: these ranks; or, where it
    reduces over one group after another, this rank's in each.
    """
    ranks, count = set().union(*axes), math.prod(map(len, axes))
    mine = {id(one) for one in module.parameters() if one.requires_grad}
    for layer in layers():
        if layer.experts is None or mine.isdisjoint(_ids_of_experts([layer])):
            continue
        world = layer.world
        known = sharding.ranks_of(world.group, layer._place)
        covers = count <= world.size and (known is None or ranks <= set(known))
        reduced = world.size == 1 and wrapper == "DistributedDataParallel"
        if covers or reduced or world in _told:
            continue
        _told.add(world)
        warnings.warn(
            f"{wrapper} reduces gradients over {count} ranks, but not those of experts in a "
            f"MoELayer, of which a world of size {world.size} has each once (this is its rank "
            f"{world.rank}). Other worlds have replicas, which would learn apart: {_remedy(layer)}",
            stacklevel=3,
        )


def _remedy(layer: MoELayer) -> str:
    """What makes replicas in other worlds learn alike. `reduce_expert_grads_` refuses some layers:
    see `training.gradient_norms.ids_of_experts`.
    """
    if layer._slicing.cuts:
        return (
            "these are slices of experts, so sum up their gradients after backward yourself, with "
            "torch.distributed.all_reduce over the ranks that hold the same slices, or make the "
            "layer with parallel='expert' and call moeos.training.reduce_expert_grads_"
        )
    if layer.placement.replicated:
        return (
            "its placement has replicas of experts in this world too, so make the layer with one "
            "that gives each expert one rank, and call moeos.training.reduce_expert_grads_"
        )
    return (
        "after backward call moeos.training.reduce_expert_grads_(model.parameters(), group, "
        "world=world), with the group of ranks that hold the same experts, such as "
        'mesh["dp"].get_group()'
    )


def _ids_of_experts(some: Iterable[MoELayer]) -> set[int]:
    held = (layer._tensor_of(name) for layer in some for name in EXPERTS)
    return {id(tensor) for tensor in held if tensor is not None}


def _ids_of_shared(some: Iterable[MoELayer]) -> set[int]:
    """The ids of shared experts' quantized tensors, which are equal on all ranks and never trained,
    and whose 8-bit floats gloo cannot send; and of slices of shared experts, which differ by rank.
    """
    some = [
        layer for layer in some if layer.cfg.shared_weight_format is not None or layer._slicing.sums
    ]
    held = (layer._tensor_of(name) for layer in some for name in _SHARED)
    return {id(tensor) for tensor in held if tensor is not None}


def layers() -> list[MoELayer]:
    """All layers that are referenced, copies included."""
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
    # A program that has not imported the class cannot have one.
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
