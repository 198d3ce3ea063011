"""The experts of a layer without their weights: a call takes the caller's tensors.

Checks what the caller passes before anything is sent, and hands one call to the engine of its
world. It knows no parameters, no router, and nothing of heaps, tasks or how ranks talk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from moeos import agreement, call_checks, custom_op
from moeos.config import MoEConfig
from moeos.engines.base import Engine
from moeos.engines.twin import TwinEngine
from moeos.tracing import RankTrace
from moeos.world import World

_NAME = "Experts"


class Experts:
    """What a layer computes behind its router, with weights that are the caller's: for a model that
    has its own router and its own parameters. One on each rank of a world. Forward only.

    Collective: all ranks make it with the same config, and call it equally often; how many tokens a
    rank passes in a call is its own affair. It holds no weights and copies none: as many layers of
    a model as there are may share one, each with tensors of its own. Copies of it are itself.

    Raises:
        ConfigMismatch: the ranks' configs differ; the same error on all of them.
        ValueError: E is not divisible by the number of ranks, or a size does not fit.
    """

    def __init__(self, cfg: MoEConfig, world: World) -> None:
        agreement.require_config(cfg)
        agreement.require_world(world)
        with world.gate:  # layers are made one after the other, whichever threads make them
            agreement.agree(cfg, world, (world.rank, world.size), _NAME)
            self._start(cfg, world)

    @classmethod
    def agreed(cls, cfg: MoEConfig, world: World) -> Experts:
        """Experts for who is in the world's gate and has the ranks' agreement. Collective."""
        made = cls.__new__(cls)
        made._start(cfg, world)
        return made

    def __call__(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        b1: torch.Tensor | None = None,
        b2: torch.Tensor | None = None,
        *,
        tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The weighted sum of each token's experts. Collective: every rank makes the call.

        Args:
            x: [rows, H] of `cfg.dtype`, contiguous, on the device of the world; 0 ≤ rows ≤
                `cfg.max_tokens`, different on every rank and in every call.
            topk_ids: [rows, k] int32 or int64 experts, numbered over all ranks. An id below 0 or
                beyond the experts is an unused slot.
            topk_weights: [rows, k] floating point weights of these experts, used as they are.
            w1: [X, 2I, H] (gate rows, then up rows), or [X, I, H] where the activation has no gate,
                of `cfg.dtype`, contiguous: this rank's X = E / P experts, from rank·X on.
            w2: [X, H, I], likewise.
            b1, b2: [X, 2I or I] and [X, H] with `cfg.bias`, likewise.
            tokens: as of `MoELayer.forward`.

        Returns:
            [rows, H] of `cfg.dtype`; zeros for a token that no expert took.

        Raises:
            TypeError, ValueError: an argument is not as above; or a token has an expert twice.
            PeerTimeout: a rank did not make the call or did not finish it before the world's
                deadline.

        When an error raises, and what a call on the GPU waits for, is as with `MoELayer.forward`.
        """
        self.check_call(x, topk_ids, topk_weights, tokens)
        weights = (w1, b1, w2, b2)
        self.check_weights(weights, "MoEConfig(bias=True) has one")
        call_checks.check_derivatives(_NAME, x, topk_weights, *weights)
        y: torch.Tensor = custom_op.forward(
            self._order,
            self.key,
            x,
            topk_ids,
            topk_weights,
            tokens,
            *weights,
            None,
            None,
            any_ids=True,
        )
        return y

    def check_call(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        tokens: torch.Tensor | None,
        *,
        routes: bool = False,
    ) -> None:
        """Raises unless these are the tensors of a call. `routes`: there may be no routing."""
        call_checks.check_x(self.cfg, self.device, x)
        if not (routes and topk_ids is None and topk_weights is None):
            rows = x.shape[0]
            call_checks.check_routing(self.cfg, self.device, rows, topk_ids, topk_weights)
        if tokens is not None:
            call_checks.check_tokens(self.device, tokens)

    def check_weights(self, weights: Sequence[torch.Tensor | None], absent: str) -> None:
        """Raises unless these, in the order of `call_checks.WEIGHTS`, are the experts' weights."""
        for name, expected, tensor in zip(
            call_checks.WEIGHTS, self._expected, weights, strict=True
        ):
            if expected is not None:
                call_checks.check_weight(self.device, expected, tensor, absent)
            elif tensor is not None:
                raise ValueError(
                    f"{name} is given, and cfg.bias is False: pass None, or make this with "
                    "MoEConfig(bias=True)"
                )

    def stats(self) -> dict[str, Any]:
        """As `MoELayer.stats`: of the last call of these experts, whoever has made it."""
        stats = self._settled().stats()
        return {
            **vars(stats),
            "bytes_to_peers": stats.bytes_to_peers,
            "busy_share": stats.busy_share,
        }

    def trace(self) -> RankTrace:
        """As `MoELayer.trace`."""
        return self._settled().trace()

    def check(self) -> None:
        """As `MoELayer.check`."""
        self._settled().check()

    def reset(self) -> None:
        """As `MoELayer.reset`."""
        self._settled().reset()

    def __copy__(self) -> Experts:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Experts:
        """These: there is nothing in them that a copy would have of its own."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be pickled: it is memory and threads of this process; make it with "
            "moeos.Experts(cfg, world) where the pickle is read"
        )

    def __repr__(self) -> str:
        return f"Experts({self.cfg}, rank={self.world.rank}, world={self.world.size})"

    def _start(self, cfg: MoEConfig, world: World) -> None:
        """Collective, in the world's gate."""
        self.cfg = cfg
        self.world = world
        with torch.device("cpu"):  # and not that of the caller, such as meta
            self.device = torch.empty(0, device=device_of(world)).device
            self.engine: Engine = engine_class(world)(cfg, world)
            self.key = custom_op.register(self.engine, self.device)
        self._order = custom_op.order_on(self.device)
        self._expected = call_checks.expected_weights(cfg, cfg.experts_per_rank(world.size))

    def _settled(self) -> Engine:
        """The engine, when the GPU has done what was launched.

        The engine waits again where no other thread can launch. Here others may, and a signal's
        handler is in no call.
        """
        if self.device.type == "cuda":
            from moeos.engines import cuda_wait  # needs packages that only a GPU's machine has

            self.engine.require_open()
            cuda_wait.synchronize(self.device)
        return self.engine


def device_of(world: World) -> torch.device:
    """Where the tensors of its calls lie."""
    return torch.device("cuda" if world.backend == "cuda" else "cpu")


def engine_class(world: World) -> type[Engine]:
    """What runs its calls."""
    if world.backend == "twin":
        return TwinEngine
    from moeos.engines.cuda import CudaEngine  # needs packages that only a GPU's machine has

    return CudaEngine
