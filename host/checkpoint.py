"""Reads the router and expert weights of one Mixture-of-Experts block from a Hugging Face model.

It knows the names and layouts that models are stored under, and nothing of the layer that will
hold the weights: it returns plain tensors.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from moeos.config import MoEConfig

_ROUTER_WEIGHT = "gate.weight"
_SELECTION_BIAS = "gate.e_score_correction_bias"

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
    cfg: MoEConfig, state_dict: Mapping[str, Tensor], prefix: str, rank: int, world_size: int
) -> dict[str, Tensor]:
    """The weights that `rank` holds of the block under `prefix`, in the layer's own layout.

    Mixtral, Qwen3-MoE, OLMoE and DeepSeek-V3 are understood, under the names of their checkpoint
    files (a matrix for each expert and projection) and under those of transformers' modules (one
    tensor for all experts: `experts.gate_up_proj` [E, 2I, H], `experts.down_proj` [E, H, I]).
    Shared experts are not part of the layer and are ignored. Only this rank's experts are copied,
    and where experts are stored one by one only these are looked up.

    Args:
        cfg: the layer; its activation must be "swiglu", as these models' is.
        state_dict: tensors by name, of the whole model or of any part that holds the block.
        prefix: what stands before "gate.weight", for example "model.layers.0.mlp." or
            "model.layers.0.block_sparse_moe" (the last dot may be left out), or "".
        rank: the rank to load for; it holds the experts rank·X … rank·X + X - 1.
        world_size: the number of ranks.

    Returns:
        contiguous copies in cfg.dtype on the device of the router: "gate.weight" [E, H], "w1"
        [X, 2I, H] with gate rows before up rows, "w2" [X, H, I]; with `cfg.bias` also "b1" [X, 2I]
        and "b2" [X, H]; with `cfg.selection_bias` also "gate.selection_bias", fp32 [E].

    Raises:
        ValueError: a tensor is missing, of another shape, quantised, or one that the layer would
            have to use and `cfg` has no place for; or `cfg`, `rank` and `world_size` do not fit.
    """
    if not cfg.gated:
        raise ValueError(f"activation is {cfg.activation!r}; these models need 'swiglu'")
    local = cfg.experts_per_rank(world_size)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}; it must be at least 0 and below {world_size}")
    if prefix and not prefix.endswith("."):
        prefix += "."
    layout = _layout(cfg, state_dict, prefix)

    router = _read(state_dict, prefix + _ROUTER_WEIGHT, (cfg.experts, cfg.hidden))
    block = {"gate.weight": _copy(router, cfg.dtype, router.device)}
    if cfg.selection_bias:
        selection_bias = _read(state_dict, prefix + _SELECTION_BIAS, (cfg.experts,))
        block["gate.selection_bias"] = _copy(selection_bias, torch.float32, router.device)

    mine = range(rank * local, (rank + 1) * local)
    experts = _Experts(cfg, state_dict, prefix, mine, router.device)
    return block | (
        experts.fused() if layout == "fused" else experts.stacked(*_PROJECTIONS[layout])
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
        every = _read(self._state_dict, self._prefix + name, (self._cfg.experts, *shape))
        mine = every[self._experts.start : self._experts.stop]
        return _copy(mine, self._cfg.dtype, self._device)

    def _stack(self, projections: tuple[str, ...], kind: str, shape: tuple[int, ...]) -> Tensor:
        stack = torch.empty(
            (len(self._experts), len(projections) * shape[0], *shape[1:]),
            dtype=self._cfg.dtype,
            device=self._device,
        )
        for place, expert in zip(stack, self._experts, strict=True):
            for part, projection in zip(place.split(shape[0]), projections, strict=True):
                name = f"{self._prefix}{expert}.{projection}.{kind}"
                part.copy_(_read(self._state_dict, name, shape))
        return stack


def _layout(cfg: MoEConfig, state_dict: Mapping[str, Tensor], prefix: str) -> str:
    """How the experts under `prefix` are stored, after a look at every name of the block."""
    layouts: set[str] = set()
    for name in state_dict:
        if not name.startswith((prefix + "gate.", prefix + "experts.")):
            continue
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            layouts.add(str(expert.lastgroup))
            if name.endswith("bias") and not cfg.bias:
                raise ValueError(f"{name} needs a config with bias=True")
        elif name == prefix + _SELECTION_BIAS:
            if not cfg.selection_bias:
                raise ValueError(f"{name} needs a config with selection_bias=True")
        elif name != prefix + _ROUTER_WEIGHT:
            raise ValueError(
                f"{name} is not understood; only unquantised weights of Mixtral, Qwen3-MoE, OLMoE "
                "and DeepSeek-V3 can be loaded"
            )
    if not layouts:
        raise ValueError(_nothing_under(state_dict, prefix))
    if len(layouts) > 1:
        raise ValueError(
            f"the experts under {prefix!r} are stored in {len(layouts)} layouts at once "
            f"({', '.join(sorted(layouts))}); keep one"
        )
    return layouts.pop()


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
