# SPDX-License-Identifier: Apache-2.0
"""torchtitan's routed experts on moeos: an override of its configs.

`--override.imports moeos.integrations.torchtitan.routed_experts` puts `MoeosRoutedExperts` in the
place of every `RoutedExperts` of a model. This file must not depend on how ranks communicate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from moeos.config.config import MoEConfig
from moeos.integrations import shared
from moeos.layer.experts import Experts

VERSION = "0.3.0"
"""The version of torchtitan whose interfaces this was written for."""

try:
    from torchtitan.config import derive, override
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
except ImportError as error:
    raise shared.missing("torchtitan", "torchtitan", VERSION) from error

WHERE = "torchtitan with moeos.integrations.torchtitan"

reset = shared.reset

MAX_TOKENS = 8192
"""The most tokens of a rank in one call, where the override does not say."""


class MoeosRoutedExperts(RoutedExperts):
    """Routed experts whose tokens moeos sends, computes and adds up; torchtitan routes them.

    With expert parallelism the ranks are those of the mesh "ep", or else this process alone. A call
    reads the parameters as they are then. It trains where `moeos.Experts` do.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        """torchtitan's, with `max_tokens`, the most tokens of a rank in a call; `backend`, as of
        `moeos.init`; and `deadline`, seconds that a rank waits for another one in a call.
        """

        max_tokens: int = MAX_TOKENS
        backend: str = "auto"
        deadline: float = shared.SERVER_DEADLINE

    def __init__(self, config: Config) -> None:
        kind = type(config.inner_experts)
        if kind is not GroupedExperts.Config:
            raise shared.refusal(
                WHERE,
                "inner_experts",
                kind.__qualname__,
                "GroupedExperts does; leave overrides of it out, and models with experts of "
                "their own",
            )
        super().__init__(config)
        self._config = config
        self._ep_group: Any = None
        self._experts: shared.OfProcess | None = None

    def parallelize(self, parallel_dims: Any) -> None:
        if parallel_dims.tp_enabled and not parallel_dims.ep_enabled:
            raise shared.refusal(
                WHERE,
                "parallelism.tensor_parallel_degree of the experts",
                parallel_dims.tp,
                "parallelism.expert_parallel_degree gives each rank whole experts",
            )
        super().parallelize(parallel_dims)
        mesh = parallel_dims.get_optional_mesh("ep")
        self._ep_group = None if mesh is None else mesh.get_group()

    def forward(
        self,
        x_BLD: torch.Tensor,
        topk_scores_BLK: torch.Tensor,
        topk_expert_ids_BLK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> torch.Tensor:
        """[B, L, D]: each token's experts, weighted by its scores. Collective over "ep"."""
        if self._experts is None or not self._experts.ready:
            if torch.compiler.is_exporting():
                raise shared.refusal(
                    WHERE, "the first call", "exported", "a call before torch.export does"
                )
            self._make_experts_in_a_call_before_torch_compile(x_BLD, topk_expert_ids_BLK.shape[-1])
        of_process, inner = self._experts, self.inner_experts
        assert of_process is not None
        experts = of_process.made
        rows, most = x_BLD.shape[:-1].numel(), experts.cfg.max_tokens
        if rows > most and experts.world.size > 1:
            raise shared.refusal(
                WHERE, "tokens of a call", rows, f"max_tokens of the override does, now {most}"
            )
        return experts(
            x_BLD,
            topk_expert_ids_BLK,
            topk_scores_BLK,
            _local(inner.w1_EFD),
            _local(inner.w2_EDF),
            w3=_local(inner.w3_EFD),
            pieces=max(1, -(-rows // most)),
        )

    @shared.untraced
    def _make_experts_in_a_call_before_torch_compile(self, x: torch.Tensor, top_k: int) -> None:
        """Makes the experts of this process, once. Collective over "ep"."""

        def prepare() -> None:
            if self._experts is None:
                self._require_whole(x)
                self._experts = self._made(x, top_k)
            self._experts.here()

        shared.preparing.run(prepare)

    def _made(self, x: torch.Tensor, top_k: int) -> shared.OfProcess:
        """The experts of a first call. Collective over "ep"."""
        inner = self._config.inner_experts
        cfg = MoEConfig(
            hidden=inner.dim,
            intermediate=inner.hidden_dim,
            experts=inner.num_experts,
            top_k=top_k,
            dtype=x.dtype,
            max_tokens=self._config.max_tokens,
            routing="caller",
            gate_up="separate",
        )
        backend = self._config.backend
        if backend == "auto" and x.device.type == "cpu":
            backend = "twin"

        def make() -> Experts:
            world = shared.world_of(self._ep_group, backend, self._config.deadline)
            return shared.experts_of(cfg, world)

        return shared.OfProcess(make)

    def _require_whole(self, x: torch.Tensor) -> None:
        """`ValueError` unless the parameters of a call are whole experts of x's dtype."""
        inner = self.inner_experts
        if isinstance(inner, FSDPModule):
            raise shared.refusal(
                WHERE,
                "fully_shard of inner_experts",
                True,
                "fully_shard of the transformer block does, as torchtitan applies it: it gathers "
                "the experts before their call",
            )
        for name in ("w1_EFD", "w2_EDF", "w3_EFD"):
            weight = getattr(inner, name)
            cut = [p for p in getattr(weight, "placements", ()) if p.is_shard() and p != Shard(0)]
            if cut:
                raise shared.refusal(
                    WHERE, f"placements of {name}", cut, "whole experts do, cut along dimension 0"
                )
            if weight.dtype != x.dtype:
                raise shared.refusal(
                    WHERE,
                    f"the dtype of {name}",
                    weight.dtype,
                    f"that of the tokens does, {x.dtype}: cast the model",
                )


def _local(weight: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter, differentiable."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def routed_experts(
    cfg: Any,
    *,
    max_tokens: int = MAX_TOKENS,
    backend: str = "auto",
    deadline: float = shared.SERVER_DEADLINE,
) -> Any:
    """The override. Its arguments, as of `MoeosRoutedExperts.Config`, may stand with its name:
    `--override.imports 'moeos.integrations.torchtitan.routed_experts={"max_tokens": 16384}'`.
    """
    return derive(
        cfg,
        MoeosRoutedExperts.Config,
        max_tokens=max_tokens,
        backend=backend,
        deadline=deadline,
    )


override(target=RoutedExperts.Config, description="Routed experts by moeos.")(routed_experts)
