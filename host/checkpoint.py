"""Reads the router and expert weights of one Mixture-of-Experts block from a Hugging Face model.

It knows the names and layouts that models are stored under, and nothing of the layer that will
hold the weights: it returns plain tensors.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moeos import sharding
from moeos.config import MoEConfig

_ROUTER_WEIGHT = "gate.weight"
# Of what stands below a block's prefix: where families keep the selection bias.
_SELECTION_BIAS = re.compile(
    r"(?:gate\.|experts\.)?(?:moe_statics\.)?(?:e_score_correction_bias|expert_bias)"
)

# An expert tensor's full name; the group that matches is the layout that the name belongs to.
_EXPERT = re.compile(
    r"(?:.*\.)?experts\.(?:"
    r"(?P<fused>(?:gate_up_proj|down_proj)(?:_bias)?)"
    r"|\d+\.(?:(?P<mixtral>w1|w2|w3)|(?P<split>gate_proj|up_proj|down_proj))\.(?:weight|bias))"
)
# The gate, up and down projection of one expert in the layouts that store them one by one.
_PROJECTIONS = {
    "mixtral": ("w1", "w3", "w2"),
    "split": ("gate_proj", "up_proj", "down_proj"),  # Qwen3-MoE, OLMoE, DeepSeek-V3
}
_LOADABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def load_block(
    cfg: MoEConfig,
    state_dict: Mapping[str, Tensor],
    prefix: str,
    rank: int,
    world_size: int,
    ignore: Sequence[str] = (),
) -> dict[str, Tensor]:
    """The weights that `rank` holds of the block under `prefix`, in the layer's own layout.

    Blocks whose names are those of Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V2, DeepSeek-V3, MiniMax-M2
    or ERNIE-4.5 are understood, under the names of checkpoint files (a matrix for each expert and
    projection) and under those of transformers' modules (one tensor for all experts:
    `experts.gate_up_proj` [E, 2I, H], `experts.down_proj` [E, H, I]). A selection bias may lie
    beside the gate, in it or in `moe_statics`. Only this rank's experts are copied, and where
    experts are stored one by one only these are looked up.

    A DTensor is taken as well. Where it is cut by experts and lies as the ranks' experts do, each
    rank takes its own part. Otherwise its ranks gather it, so that all of them must call.

    No tensor under the prefix is passed over: one that the layer has no use for raises, by its
    name, unless `ignore` says that the caller has. Shared experts are such: the layer computes
    without them.

    Args:
        cfg: the layer; its activation must be "swiglu", as these models' is.
        state_dict: tensors by name, of the whole model or of any part that holds the block.
        prefix: what stands before "gate.weight", for example "model.layers.0.mlp." or
            "model.layers.0.block_sparse_moe" (the last dot may be left out), or "".
        rank: the rank to load for; it holds the experts rank·X … rank·X + X - 1.
        world_size: the number of ranks.
        ignore: what names begin with, below the prefix, of tensors that the caller uses elsewhere:
            ("shared_experts.",), for example. None of them may be the layer's.

    Returns:
        contiguous copies in cfg.dtype on the device of the router: "gate.weight" [E, H] in
        cfg.gate_dtype, "w1" [X, 2I, H] with gate rows before up rows, "w2" [X, H, I]; with
        `cfg.bias` also "b1" [X, 2I] and "b2" [X, H]; with `cfg.selection_bias` also
        "gate.selection_bias", fp32 [E].

    Raises:
        TypeError: `ignore` is a single string.
        ValueError: a tensor is missing, of another shape, quantised, or under the prefix and
            neither used nor ignored; or `cfg`, `rank` and `world_size` do not fit.
    """
    if not cfg.gated:
        raise ValueError(f"activation is {cfg.activation!r}; these models need 'swiglu'")
    local = cfg.experts_per_rank(world_size)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}; it must be at least 0 and below {world_size}")
    if prefix and not prefix.endswith("."):
        prefix += "."
    names = _look_through(cfg, state_dict, prefix, ignore)

    router_name = prefix + _ROUTER_WEIGHT
    router = _read(state_dict, router_name, (cfg.experts, cfg.hidden))
    router = sharding.everything(router_name, router)
    block = {"gate.weight": _copy(router, cfg.gate_dtype, router.device)}
    if cfg.selection_bias:
        selection_bias = _read_selection_bias(cfg, state_dict, prefix, names.selection_bias)
        block["gate.selection_bias"] = _copy(selection_bias, torch.float32, router.device)

    mine = range(rank * local, (rank + 1) * local)
    experts = _Experts(cfg, state_dict, prefix, mine, router.device)
    return block | (
        experts.fused() if names.layout == "fused" else experts.stacked(*_PROJECTIONS[names.layout])
    )


class _Experts:
    """A run of consecutive experts of one block."""

    def __init__(
        self,
        cfg: MoEConfig,
        state_dict: Mapping[str, Tensor],
        prefix: str,
        experts: range,
        device: torch.device,
    ) -> None:
        self._cfg = cfg
        self._state_dict = state_dict
        self._prefix = prefix + "experts."
        self._experts = experts
        self._device = device

    def fused(self) -> dict[str, Tensor]:
        """Both weights, and biases, from tensors that hold all experts."""
        cfg = self._cfg
        block = {
            "w1": self._slice("gate_up_proj", (cfg.w1_rows, cfg.hidden)),
            "w2": self._slice("down_proj", (cfg.hidden, cfg.intermediate)),
        }
        if cfg.bias:
            block["b1"] = self._slice("gate_up_proj_bias", (cfg.w1_rows,))
            block["b2"] = self._slice("down_proj_bias", (cfg.hidden,))
        return block

    def stacked(self, gate: str, up: str, down: str) -> dict[str, Tensor]:
        """Both weights, and biases, from a tensor for each expert and projection."""
        cfg = self._cfg
        block = {
            "w1": self._stack((gate, up), "weight", (cfg.intermediate, cfg.hidden)),
            "w2": self._stack((down,), "weight", (cfg.hidden, cfg.intermediate)),
        }
        if cfg.bias:
            block["b1"] = self._stack((gate, up), "bias", (cfg.intermediate,))
            block["b2"] = self._stack((down,), "bias", (cfg.hidden,))
        return block

    def _slice(self, name: str, shape: tuple[int, ...]) -> Tensor:
        name = self._prefix + name
        every = _read(self._state_dict, name, (self._cfg.experts, *shape))
        own = len(self._experts)
        rank, ranks = self._experts.start // own, self._cfg.experts // own
        mine = sharding.part(name, every, torch.Size((own, *shape)), rank, ranks)
        return _copy(mine, self._cfg.dtype, self._device)

    def _stack(self, projections: tuple[str, ...], kind: str, shape: tuple[int, ...]) -> Tensor:
        stack = torch.empty(
            (len(self._experts), len(projections) * shape[0], *shape[1:]),
            dtype=self._cfg.dtype,
            device=self._device,
        )
        names = [f"{{}}.{projection}.{kind}" for projection in projections]
        gathered = any(
            sharding.is_cut(_read(self._state_dict, self._prefix + name.format(expert), shape))
            for name in names
            for expert in self._experts[:1]
        )
        # To gather is collective: then each rank asks for all experts, in the same order.
        for expert in range(self._cfg.experts) if gathered else self._experts:
            for number, name in enumerate(names):
                name = self._prefix + name.format(expert)
                tensor = _read(self._state_dict, name, shape)
                if sharding.is_cut(tensor) and not gathered:
                    raise ValueError(
                        f"{name} is a DTensor that is cut into parts, and the first expert's is "
                        "not: pass all experts alike, or whole tensors (DTensor.full_tensor)"
                    )
                whole = sharding.everything(name, tensor)
                if expert in self._experts:
                    part = stack[expert - self._experts.start].split(shape[0])[number]
                    part.copy_(whole)
        return stack


class _Names(NamedTuple):
    """What a look at every name of a block has found: how its experts are stored, and what its
    selection bias is called, or None.
    """

    layout: str
    selection_bias: str | None


def _look_through(
    cfg: MoEConfig, state_dict: Mapping[str, Tensor], prefix: str, ignore: Sequence[str]
) -> _Names:
    """Raises unless each tensor under `prefix` is the layer's or to be ignored, and not both."""
    if isinstance(ignore, str):
        raise TypeError(f"ignore is {ignore!r}; it must be a sequence of strings: [{ignore!r}]")
    layouts: set[str] = set()
    biases: list[str] = []
    unused: list[str] = []
    for name in state_dict:
        if not name.startswith(prefix):
            continue
        below = name[len(prefix) :]
        expert = _EXPERT.fullmatch(below) if below.startswith("experts.") else None
        if expert is not None:
            layouts.add(str(expert.lastgroup))
            if name.endswith("bias") and not cfg.bias:
                raise ValueError(f"{name} needs a config with bias=True")
        elif _SELECTION_BIAS.fullmatch(below) is not None:
            biases.append(name)
            if not cfg.selection_bias:
                raise ValueError(f"{name} needs a config with selection_bias=True")
        elif below != _ROUTER_WEIGHT:
            if not below.startswith(tuple(ignore)):
                unused.append(name)
            continue
        if below.startswith(tuple(ignore)):
            raise ValueError(f"ignore is {list(ignore)} and {name} is the layer's; it is needed")
    if not layouts:
        raise ValueError(_nothing_under(state_dict, prefix))
    if unused:
        raise ValueError(_not_used(unused, prefix))
    if len(layouts) > 1:
        raise ValueError(
            f"the experts under {prefix!r} are stored in {len(layouts)} layouts at once "
            f"({', '.join(sorted(layouts))}); keep one"
        )
    if len(biases) > 1:
        raise ValueError(f"{' and '.join(biases)} are both a selection bias; keep one")
    return _Names(layouts.pop(), biases[0] if biases else None)


def _not_used(names: list[str], prefix: str) -> str:
    """What is said of tensors that the layer has no use for: the first of them, and a remedy."""
    first = names[0]
    others = f", and {len(names) - 1} more tensors under {prefix!r}," if len(names) > 1 else ""
    part = first[len(prefix) :].split(".")[0]
    if part in ("gate", "experts"):
        return (
            f"{first}{others} is not understood; only unquantised weights under the names of "
            "Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V2, DeepSeek-V3, MiniMax-M2 and ERNIE-4.5 can be "
            "loaded"
        )
    return (
        f"{first}{others} is not used by the layer, which has routed experts alone; if it is "
        f"computed elsewhere, pass ignore=[{part + '.'!r}]"
    )


def _read_selection_bias(
    cfg: MoEConfig, state_dict: Mapping[str, Tensor], prefix: str, name: str | None
) -> Tensor:
    """The bias [E]; some families have it as [1, E]."""
    if name is None:
        raise ValueError(
            f"no selection bias is under {prefix!r}, such as 'gate.e_score_correction_bias'; this "
            f"config needs one with shape {[cfg.experts]}"
        )
    shape = (1, cfg.experts) if state_dict[name].dim() == 2 else (cfg.experts,)
    return sharding.everything(name, _read(state_dict, name, shape)).view(cfg.experts)


def _nothing_under(state_dict: Mapping[str, Tensor], prefix: str) -> str:
    found = dict.fromkeys(
        name[: name.rindex("experts.")] for name in state_dict if _EXPERT.fullmatch(name)
    )
    if not found:
        return f"prefix is {prefix!r}; no name in the state_dict is that of an expert's weight"
    nearest = difflib.get_close_matches(prefix, found, n=4, cutoff=0.0)
    return (
        f"prefix is {prefix!r} and no expert's weight is under it; of the {len(found)} prefixes "
        f"that have some, the nearest are {', '.join(map(repr, nearest))}"
    )


def _read(state_dict: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    if name not in state_dict:
        raise ValueError(f"{name} is missing; this config needs it with shape {list(shape)}")
    tensor = state_dict[name].detach()
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; this config needs {list(shape)}")
    if tensor.dtype not in _LOADABLE:
        raise ValueError(
            f"{name} is {tensor.dtype}; dequantise it to one of {', '.join(map(str, _LOADABLE))}"
        )
    return tensor


def _copy(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    return tensor.to(device, dtype, copy=True, memory_format=torch.contiguous_format)
