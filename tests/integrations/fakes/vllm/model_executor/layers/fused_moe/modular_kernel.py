# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for vLLM: a modular kernel, in the order in which vLLM calls its parts.

Prepare, workspaces, the experts into the output or a buffer like it, finalize.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from enum import Enum
from math import prod
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
)


class FusedMoEActivationFormat(Enum):
    Standard = ("standard",)
    BatchedExperts = ("batched_experts",)


@dataclasses.dataclass
class ExpertTokensMetadata:
    expert_num_tokens: torch.Tensor | None
    expert_num_tokens_cpu: torch.Tensor | None


class TopKWeightAndReduce(ABC):
    @abstractmethod
    def apply(
        self,
        output: torch.Tensor | None,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
    ) -> torch.Tensor: ...


class FusedMoEPrepareAndFinalize(ABC):
    @property
    @abstractmethod
    def activation_format(self) -> FusedMoEActivationFormat: ...

    @abstractmethod
    def topk_indices_dtype(self) -> torch.dtype | None: ...

    @abstractmethod
    def output_is_reduced(self) -> bool: ...

    def post_init_setup(self, fused_experts: FusedMoEExperts) -> None:
        return

    def supports_async(self) -> bool:
        return False


class FusedMoEPrepareAndFinalizeModular(FusedMoEPrepareAndFinalize):
    @abstractmethod
    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
        defer_input_quant: bool,
    ) -> tuple[Any, ...]: ...

    @abstractmethod
    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> None: ...


class FusedMoEExperts(ABC):
    def __init__(
        self,
        moe_config: FusedMoEConfig,
        quant_config: FusedMoEQuantConfig,
        max_num_tokens: int | None = None,
        num_dispatchers: int | None = None,
    ) -> None:
        standard = self.activation_format() is FusedMoEActivationFormat.Standard
        assert standard == (max_num_tokens is None and num_dispatchers is None)
        self.moe_config = moe_config
        self.quant_config = quant_config

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        return

    @staticmethod
    @abstractmethod
    def is_monolithic() -> bool: ...

    @property
    def expects_unquantized_inputs(self) -> bool:
        return False

    @staticmethod
    @abstractmethod
    def activation_format() -> FusedMoEActivationFormat: ...

    @staticmethod
    @abstractmethod
    def _supports_current_device() -> bool: ...

    @staticmethod
    @abstractmethod
    def _supports_no_act_and_mul() -> bool: ...

    @staticmethod
    @abstractmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool: ...

    @staticmethod
    @abstractmethod
    def _supports_activation(activation: MoEActivation) -> bool: ...

    @staticmethod
    @abstractmethod
    def _supports_parallel_config(moe_parallel_config: FusedMoEParallelConfig) -> bool: ...

    @property
    def w1_scale(self) -> torch.Tensor | None:
        return self.quant_config.w1_scale

    @property
    def w2_scale(self) -> torch.Tensor | None:
        return self.quant_config.w2_scale

    @property
    def w1_bias(self) -> torch.Tensor | None:
        return self.quant_config.w1_bias

    @property
    def w2_bias(self) -> torch.Tensor | None:
        return self.quant_config.w2_bias

    @property
    def a2_scale(self) -> torch.Tensor | None:
        return self.quant_config.a2_scale


class FusedMoEExpertsModular(FusedMoEExperts):
    @staticmethod
    def is_monolithic() -> bool:
        return False

    def moe_problem_size(
        self,
        a1: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_ids: torch.Tensor,
    ) -> tuple[int, int, int, int, int]:
        assert len(w1.shape) == 3
        assert len(w2.shape) == 3
        assert topk_ids.size(0) == a1.size(0)
        return w1.size(0), a1.size(0), w1.size(1), a1.size(-1), topk_ids.size(1)

    def workspace_dtype(self, act_dtype: torch.dtype) -> torch.dtype:
        return act_dtype

    @abstractmethod
    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: ExpertTokensMetadata | None,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]: ...

    @abstractmethod
    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce: ...

    @abstractmethod
    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None: ...


class FusedMoEKernel:
    def __init__(
        self,
        prepare_finalize: FusedMoEPrepareAndFinalizeModular,
        fused_experts: FusedMoEExpertsModular,
    ) -> None:
        self.prepare_finalize = prepare_finalize
        self.fused_experts = fused_experts
        prepare_finalize.post_init_setup(fused_experts)
        assert prepare_finalize.activation_format == fused_experts.activation_format()

    def output_is_reduced(self) -> bool:
        return self.prepare_finalize.output_is_reduced()

    def apply(
        self,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        experts, stages = self.fused_experts, self.prepare_finalize
        output = torch.empty_like(hidden_states)
        a1q, a1q_scale, tokens_meta, new_ids, new_weights = stages.prepare(
            hidden_states,
            topk_weights,
            topk_ids,
            global_num_experts,
            expert_map,
            apply_router_weight_on_input,
            experts.quant_config,
            defer_input_quant=experts.expects_unquantized_inputs,
        )
        topk_ids = topk_ids if new_ids is None else new_ids
        topk_weights = topk_weights if new_weights is None else new_weights
        local, m, n, k, topk = experts.moe_problem_size(a1q, w1, w2, topk_ids)
        if m == 0:
            return torch.empty_like(a1q)
        shape13, shape2, out_shape = experts.workspace_shapes(
            m, n, k, topk, global_num_experts, local, tokens_meta, activation
        )
        dtype = experts.workspace_dtype(hidden_states.dtype)
        common = torch.full((max(prod(shape13), prod(out_shape)),), torch.nan, dtype=dtype)
        aliases = output.shape == out_shape and output.dtype == dtype and output.is_contiguous()
        fused_out = output if aliases else common[: prod(out_shape)].view(out_shape)
        experts.apply(
            output=fused_out,
            hidden_states=a1q,
            w1=w1,
            w2=w2,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=activation,
            global_num_experts=global_num_experts,
            expert_map=expert_map,
            a1q_scale=a1q_scale,
            a2_scale=experts.a2_scale,
            workspace13=common[: prod(shape13)].view(shape13),
            workspace2=torch.full(shape2, torch.nan, dtype=dtype),
            expert_tokens_meta=tokens_meta,
            apply_router_weight_on_input=apply_router_weight_on_input,
        )
        stages.finalize(
            output,
            fused_out,
            topk_weights,
            topk_ids,
            apply_router_weight_on_input,
            experts.finalize_weight_and_reduce_impl(),
        )
        return output
