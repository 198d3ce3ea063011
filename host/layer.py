"""The Mixture-of-Experts layer as a PyTorch module.

Holds this rank's weights, checks what the caller passes before anything is sent, and hands one call
to the engine of its world. It knows nothing of heaps, tasks or how ranks talk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from moeos import checkpoint
from moeos.config import MoEConfig, digest_differences
from moeos.engines.base import CallTensors, Engine
from moeos.engines.twin import TwinEngine
from moeos.errors import ConfigMismatch
from moeos.world import World

_SEED_BITS = 62


class Gate(nn.Module):
    """The router: weight [E, H], and selection_bias fp32 [E] where the config has one."""

    def __init__(self, cfg: MoEConfig) -> None:
        super().__init__()
        self.weight = _parameter(cfg.experts, cfg.hidden, dtype=cfg.dtype)
        bias = torch.zeros(cfg.experts, dtype=torch.float32) if cfg.selection_bias else None
        self.register_buffer("selection_bias", bias)
        self.selection_bias: torch.Tensor | None

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Gate:
        """Moves the parameters as `to` asks; the bias goes along and stays fp32 with its bits."""
        bias = self.selection_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if bias is not None and self.selection_bias is not None:
            self.selection_bias = bias.to(self.selection_bias.device)
        return self


class MoELayer(nn.Module):
    """An expert-parallel Mixture-of-Experts layer; one on each rank of a world. Forward only.

    Collective: all ranks make it with the same config, and call it equally often; how many tokens a
    rank passes in a call is its own affair.

    Parameters (dtype `cfg.dtype`; this rank holds the X = E / P experts from rank·X on):
        gate.weight [E, H]: the router.
        w1 [X, 2I, H] (gate rows, then up rows), or [X, I, H] where the activation has no gate.
        w2 [X, H, I].
        b1 [X, 2I or I], b2 [X, H] with `cfg.bias`.
        gate.selection_bias fp32 [E] with `cfg.selection_bias` (a buffer).
    They start uniform in ±1/sqrt(inputs), from a seed that rank 0 draws: an expert starts the same
    on whichever rank it lies.

    Raises:
        ConfigMismatch: the ranks' configs differ; the same error on all of them.
        ValueError: E is not divisible by the number of ranks, or a size does not fit.
    """

    def __init__(self, cfg: MoEConfig, world: World) -> None:
        super().__init__()
        if not isinstance(cfg, MoEConfig):
            raise TypeError(f"cfg is a {type(cfg).__name__}; it must be a MoEConfig")
        if not isinstance(world, World):
            raise TypeError(
                f"world is a {type(world).__name__}; it must be what moeos.init returned"
            )
        digests = world.control.allgather(cfg.digest(), "the comparison of the ranks' configs")
        _require_equal(digests)
        local = cfg.experts_per_rank(world.size)
        engine_class = _engine_class(world)
        engine_class.check_supported(cfg)
        self.cfg = cfg
        self.world = world
        with torch.device("cuda" if world.backend == "cuda" else "cpu"):
            self.gate = Gate(cfg)
            self.w1 = _parameter(local, cfg.w1_rows, cfg.hidden, dtype=cfg.dtype)
            self.w2 = _parameter(local, cfg.hidden, cfg.intermediate, dtype=cfg.dtype)
            self.b1 = _parameter(local, cfg.w1_rows, dtype=cfg.dtype) if cfg.bias else None
            self.b2 = _parameter(local, cfg.hidden, dtype=cfg.dtype) if cfg.bias else None
        drawn = int(torch.randint(1 << _SEED_BITS, ()).item())
        self._initialise(world.control.allgather(drawn, "the seed of the initial weights")[0])
        self._expected = {name: (t.shape, t.dtype) for name, t in self.state_dict().items()}
        self._device = self.w1.device
        self._engine = engine_class(cfg, world)

    @classmethod
    def from_hf(
        cls, cfg: MoEConfig, world: World, state_dict: Mapping[str, torch.Tensor], prefix: str
    ) -> MoELayer:
        """A layer with the weights of a Mixtral, Qwen3-MoE, OLMoE or DeepSeek-V3 block.

        `state_dict` holds the block's tensors under their Hugging Face names below `prefix`, such
        as "model.layers.0.mlp."; this rank's experts are kept. See `moeos.checkpoint.load_block`,
        whose errors it raises.
        """
        layer = cls(cfg, world)
        block = checkpoint.load_block(cfg, state_dict, prefix, world.rank, world.size)
        layer.load_state_dict(block)
        return layer

    def forward(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The layer's output for this rank's tokens. Collective: every rank makes the call.

        Args:
            x: [S, H] of `cfg.dtype`, contiguous, on the engine's device; 0 ≤ S ≤ `cfg.max_tokens`,
                different on every rank and in every call.
            topk_ids: [S, k] int32 or int64 experts chosen by the caller, used as they are; −1 marks
                an unused slot. Given together with topk_weights, or not at all: then the layer
                    routes by its gate.
            topk_weights: [S, k] floating point weights of these experts, used as they are.

        Returns:
            [S, H] of `cfg.dtype`; zeros for a token that no expert took.

        Raises:
            TypeError, ValueError: a tensor is not as above; before anything is sent.
            NumericalError: logits of some token are not finite; on every rank.
            PeerTimeout: a rank did not make the call or did not finish it before the world's
                deadline.
        """
        cfg = self.cfg
        self._check_x(x)
        ids, weights = self._check_routing(x.shape[0], topk_ids, topk_weights)
        self._check_parameters()
        self._check_gradients(x, topk_weights)
        out = torch.empty_like(x)
        capacity = cfg.capacity(x.shape[0])
        self._engine.forward(
            CallTensors(
                x=x,
                out=out,
                gate=self.gate.weight,
                selection_bias=self.gate.selection_bias,
                topk_ids=ids,
                topk_weights=weights,
                w1=self.w1,
                b1=self.b1,
                w2=self.w2,
                b2=self.b2,
            ),
            pair_limit=cfg.max_tokens if capacity is None else capacity,
        )
        return out

    def stats(self) -> dict[str, Any]:
        """What this rank did in its last call: the fields of `CallStats`, and `bytes_to_peers`,
        their sum.
        """
        stats = self._engine.stats()
        return {**vars(stats), "bytes_to_peers": stats.bytes_to_peers}

    def check(self) -> None:
        """Raises what has gone wrong in the calls so far. Waits for them.

        On the twin a call raises by itself. On the GPU a call only launches: a late peer or logits
        that are not finite are known when the kernel has ended, and raise here.
        """
        self._engine.check()

    def reset(self) -> None:
        """Makes the layer usable again after a call that failed. Collective; no rank may be in a
        call.
        """
        self._engine.reset()

    def extra_repr(self) -> str:
        """What `print` shows of the layer."""
        return f"{self.cfg}, rank={self.world.rank}, world={self.world.size}"

    def _initialise(self, seed: int) -> None:
        generator = torch.Generator(self.w1.device)  # drawn where they lie, gigabytes in no time
        first = self.world.rank * self.w1.shape[0]
        with torch.no_grad():
            generator.manual_seed(seed)
            _fill_uniform(self.gate.weight, generator)
            for local in range(self.w1.shape[0]):
                generator.manual_seed((seed + 1 + first + local) % (1 << _SEED_BITS))
                _fill_uniform(self.w1[local], generator)
                _fill_uniform(self.w2[local], generator)
                for bias in (self.b1, self.b2):
                    if bias is not None:
                        bias[local].zero_()

    def _check_x(self, x: torch.Tensor) -> None:
        cfg = self.cfg
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x is a {type(x).__name__}; it must be a torch.Tensor")
        if x.dim() != 2 or x.shape[1] != cfg.hidden:
            raise ValueError(f"x has shape {list(x.shape)}; it must be [S, {cfg.hidden}]")
        if x.dtype != cfg.dtype:
            raise TypeError(f"x has dtype {x.dtype}; it must be {cfg.dtype}, the layer's")
        if x.device != self._device:
            raise ValueError(
                f"x is on {x.device}; it must be on {self._device}, the layer's device"
            )
        if not x.is_contiguous():
            raise ValueError(
                f"x has strides {x.stride()}; it must be contiguous: pass x.contiguous()"
            )
        if x.shape[0] > cfg.max_tokens:
            raise ValueError(
                f"x has {x.shape[0]} tokens; at most max_tokens, {cfg.max_tokens}, are allowed"
            )

    def _check_routing(
        self, tokens: int, ids: torch.Tensor | None, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if ids is None and weights is None:
            return None, None
        if ids is None or weights is None:
            missing = "topk_ids" if ids is None else "topk_weights"
            raise ValueError(f"{missing} is None; topk_ids and topk_weights must be given together")
        shape = [tokens, self.cfg.top_k]
        for name, tensor in (("topk_ids", ids), ("topk_weights", weights)):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor")
            if list(tensor.shape) != shape:
                raise ValueError(
                    f"{name} has shape {list(tensor.shape)}; it must be {shape}, [S, top_k]"
                )
            if tensor.device != self._device:
                raise ValueError(f"{name} is on {tensor.device}; it must be on {self._device}")
        if ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(
                f"topk_ids has dtype {ids.dtype}; it must be torch.int32 or torch.int64"
            )
        if not weights.is_floating_point():
            raise TypeError(
                f"topk_weights has dtype {weights.dtype}; it must be a floating point type"
            )
        if ids.device.type == "cpu":  # looking at a GPU's tensor would wait for it
            self._check_ids(ids)
        return ids.to(torch.int32).contiguous(), weights.to(torch.float32).contiguous()

    def _check_ids(self, ids: torch.Tensor) -> None:
        outside = (ids < -1) | (ids >= self.cfg.experts)
        if outside.any():
            token, slot = outside.nonzero()[0].tolist()
            raise ValueError(
                f"topk_ids[{token}, {slot}] is {int(ids[token, slot])}; it must be −1 (unused) "
                "or an expert, "
                f"0 to {self.cfg.experts - 1}"
            )
        ordered = ids.sort(dim=1).values
        repeated = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        if repeated.any():
            token, slot = repeated.nonzero()[0].tolist()
            raise ValueError(
                f"topk_ids[{token}] is {ids[token].tolist()}; an expert, here "
                f"{int(ordered[token, slot + 1])}, "
                "may appear only once in a row"
            )

    def _check_gradients(self, *inputs: torch.Tensor | None) -> None:
        tensors = [*inputs, *self.parameters()]
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
            raise RuntimeError(
                "MoELayer has no backward, and a tensor requires a gradient: call it under "
                "torch.no_grad(), or detach x, topk_weights and the parameters"
            )

    def _check_parameters(self) -> None:
        """Parameters may have been replaced or moved since the layer was made."""
        state = self.state_dict()
        for name, (shape, dtype) in self._expected.items():
            tensor = state.get(name)
            if tensor is None:
                raise ValueError(f"{name} is missing; the layer was made with one: {list(shape)}")
            if tensor.shape != shape:
                raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be {list(shape)}")
            if tensor.dtype != dtype:
                raise TypeError(f"{name} has dtype {tensor.dtype}; it must be {dtype}")
            if tensor.device != self._device:
                raise ValueError(f"{name} is on {tensor.device}; it must be on {self._device}")
            if not tensor.is_contiguous():
                raise ValueError(f"{name} has strides {tensor.stride()}; it must be contiguous")
        bias = self.gate.selection_bias
        if bias is not None and bias.device.type == "cpu" and not bias.isfinite().all():
            expert = int((~bias.isfinite()).nonzero()[0])
            raise ValueError(
                f"gate.selection_bias[{expert}] is {float(bias[expert])}; it must be finite"
            )


def _engine_class(world: World) -> type[Engine]:
    if world.backend == "twin":
        return TwinEngine
    from moeos.engines.cuda import CudaEngine  # needs packages that only a GPU's machine has

    return CudaEngine


def _parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


def _fill_uniform(weight: torch.Tensor, generator: torch.Generator) -> None:
    bound = weight.shape[-1] ** -0.5
    drawn = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    weight.copy_(drawn.uniform_(-bound, bound, generator=generator))


def _require_equal(digests: list[str]) -> None:
    """Raises `ConfigMismatch`, with the same sentence on every rank, unless all digests are
    equal.
    """
    for rank, digest in enumerate(digests):
        listed = "; ".join(
            f"{name} is {first!r} on rank 0 and {other!r} on rank {rank}"
            for name, (first, other) in digest_differences(digests[0], digest).items()
        )
        if listed:
            raise ConfigMismatch(f"all ranks must make the layer with the same config: {listed}")
