# SPDX-License-Identifier: Apache-2.0
"""vLLM's routed experts on moeos: a modular kernel that dispatches and combines itself.

The kernel takes the place of FlashInfer's fused expert-parallel kernels: after a prepare and
finalize stage that only passes tensors through. This file knows vLLM's interfaces of `shared.VLLM`
and `moeos.Experts`, and must not depend on how ranks communicate.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch

from moeos.config.config import MoEConfig
from moeos.config.element_formats import ActivationFormat, WeightFormat
from moeos.integrations import shared
from moeos.layer.experts import Experts
from moeos.partition.slicing import Parallel

try:
    from vllm.config import get_current_vllm_config
    from vllm.distributed import get_ep_group, get_tp_group
    from vllm.model_executor.layers.fused_moe import modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        FusedMoEQuantConfig,
    )
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
    from vllm.model_executor.layers.fused_moe.prepare_finalize.passthrough import (
        PassThroughPrepareAndFinalize,
    )
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
        TopKWeightAndReduceNoOP,
    )
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )
    from vllm.platforms import current_platform
except ImportError as error:
    raise shared.missing("vllm", "vllm", shared.VLLM) from error

_log = logging.getLogger("vllm.moeos")  # below vLLM's own, which it sets up

WHERE = "vLLM with --quantization moeos"

WHOLE = "--enable-expert-parallel gives each rank whole experts"
"""What works where experts cannot be cut."""

ACTIVATIONS = {
    "silu": "swiglu",
    "gelu_tanh": "geglu_tanh",
    "swigluoai": "swigluoai",
    "swigluoai_uninterleave": "swigluoai",
    "silu_no_mul": "silu",
    "gelu_no_mul": "gelu",
    "gelu_tanh_no_mul": "gelu_tanh",
    "relu2_no_mul": "relu2",
}
"""vLLM's name of an activation -> that of moeos."""

INTERLEAVED = "swigluoai"
"""vLLM's activation whose weights have gate 0, up 0, gate 1, up 1, and so on: those of gpt-oss."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What `--additional-config '{"moeos": {...}}'` may say.

    Attributes:
        backend: as of `moeos.init`; None is "twin" where vLLM computes on CPUs, or else "cuda".
        deadline: seconds that a rank waits for another one in a call.
        activation_format: of `MoEConfig`. "fp8_group128" rounds tokens of experts in a format.
    """

    backend: str | None = None
    deadline: float = shared.SERVER_DEADLINE
    activation_format: ActivationFormat | None = None

    @classmethod
    def current(cls) -> Options:
        """The options in the current vLLM config; `ValueError` for a name that is no option."""
        additional = get_current_vllm_config().additional_config
        given = additional.get(shared.NAME, {}) if isinstance(additional, dict) else {}
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(given, dict) or not set(given) <= set(names):
            raise shared.refusal(
                WHERE,
                f"additional_config[{shared.NAME!r}]",
                given,
                f"its keys are {', '.join(names)}",
            )
        return cls(**given)


class MoeosExperts(mk.FusedMoEExpertsModular):
    """The experts of a layer, on the ranks of vLLM's expert-parallel group.

    Tensor-parallel ranks hold equal tokens: each passes its part of them on, and all gather the
    results. Data-parallel ranks, and tensor-parallel ones whose tokens vLLM has split already, pass
    theirs. Without expert parallelism each rank holds a slice of every expert. Where all have equal
    tokens, moeos adds up what these make; with data parallelism tokens go to all slices. So the
    output is complete on every rank, and `PassThroughPrepareAndFinalize` says so: vLLM adds up
    nothing.
    """

    weight_format: WeightFormat | None = None
    """The format of the layer's weights; the code that creates these experts sets it."""

    options: Options
    """The options of moeos; the code that creates these experts sets them."""

    _made: shared.OfProcess

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return bool(current_platform.is_cpu() or current_platform.is_device_capability(90))

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key is None and activation_key is None

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation.value in ACTIVATIONS

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: FusedMoEParallelConfig) -> bool:
        return bool(moe_parallel_config.pcp_size == 1)

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return (0,), (0,), (M, K)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Makes the world, with the first layer, and the experts. Collective over the group."""
        require_placement(layer, self.weight_format)
        options = self.options
        backend = options.backend or ("twin" if current_platform.is_cpu() else "cuda")
        sizes = self.moe_config.moe_parallel_config
        parallel = parallel_of(sizes)
        cfg = config_of(self.moe_config, self.weight_format, options.activation_format)

        def make() -> Experts:
            world = shared.world_of(get_ep_group().cpu_group, backend, options.deadline)
            return shared.experts_of(cfg, world, parallel)

        self._made = shared.OfProcess(make)
        world = self._made.made.world
        what = "experts" if parallel == "expert" else "slices of experts"
        place = (world.rank, world.size)
        _log.info("%s: %s of rank %d of %d by moeos", layer.layer_name, what, *place)
        shares = parallel != "tensor" and not sizes.is_sequence_parallel
        self._tp = get_tp_group() if shares and get_tp_group().world_size > 1 else None

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
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Writes the weighted sum of each token's experts into `output` [M, K].

        `topk_ids` number the experts of all ranks, so `expert_map`, which says the same of the
        placement as `require_placement`, has nothing to add. The workspaces have no elements.
        Slices hold whole biases of w2: the first rank's are added, whatever vLLM's loaders have put
        in place of the others'.
        """
        if apply_router_weight_on_input:  # with one expert a token, by vLLM's rule
            hidden_states = hidden_states * topk_weights.to(hidden_states.dtype)
            topk_weights = torch.ones_like(topk_weights)
        weights = (w1, w2, self.w1_bias, self.w2_bias, self.w1_scale, self.w2_scale)
        experts = self._made.here()
        if self._tp is None:
            experts(hidden_states, topk_ids, topk_weights, *weights, out=output)
            return
        rows = hidden_states.shape[0]
        first, end, most = shared.part(rows, self._tp.rank_in_group, self._tp.world_size)
        mine = output.new_zeros(most, output.shape[1])
        mine[: end - first] = experts(
            hidden_states[first:end], topk_ids[first:end], topk_weights[first:end], *weights
        )
        output.copy_(self._tp.all_gather(mine, dim=0)[:rows])


class OnMoeos(FusedMoEMethodBase):
    """What moeos' methods have in common. The next parent is vLLM's own method for these weights:
    it makes the weights, as its loaders know them, and calls the kernel.
    """

    moe_kernel: mk.FusedMoEKernel | None
    experts_cls: type[mk.FusedMoEExperts] | None
    weight_format: WeightFormat | None = None
    supports_pre_processed_weights = True

    def start(self, moe: FusedMoEConfig) -> None:
        """Replaces vLLM's `__init__`, which looks for a kernel among vLLM's own."""
        refuse_unsupported(moe, self.weight_format)
        FusedMoEMethodBase.__init__(self, moe)
        self.options = Options.current()
        self.experts_cls = MoeosExperts

    @property
    def supports_eplb(self) -> bool:
        return False

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: torch.dtype,
        moe_parallel_config: FusedMoEParallelConfig,
    ) -> tuple[int, int]:
        return hidden_size, intermediate_size_per_partition

    def process_weights_after_loading(self, layer: Any) -> None:
        """Makes the kernel, once. No weight is read: a call takes the layer's, as they are then."""
        if self.moe_kernel is not None:
            return
        quant = self._quant_config_of(layer)
        experts = MoeosExperts(self.moe, quant)
        experts.weight_format, experts.options = self.weight_format, self.options
        experts.process_weights_after_loading(layer)
        self.moe_quant_config = quant
        self.moe_kernel = mk.FusedMoEKernel(PassThroughPrepareAndFinalize(), experts)

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """Applies vLLM's own method with the scales and biases that the layer has now, even if they
        were replaced.

        Raises `RuntimeError` before `process_weights_after_loading`.
        """
        layer = kwargs["layer"]  # vLLM passes all by name
        if self.moe_kernel is None:
            raise RuntimeError(
                f"{WHERE}: {layer.layer_name} has no kernel, which process_weights_after_loading "
                "of its quant_method makes: call that on all ranks before the first call"
            )
        self.moe_kernel.fused_experts.quant_config = self._quant_config_of(layer)
        return super().apply(*args, **kwargs)

    def _quant_config_of(self, layer: Any) -> FusedMoEQuantConfig:
        quant: FusedMoEQuantConfig | None = self.get_fused_moe_quant_config(layer)
        assert quant is not None
        return quant


class MoeosMethod(OnMoeos, UnquantizedFusedMoEMethod):
    """Weights as vLLM's unquantised method has them, and `MoeosExperts` to compute with them."""

    def __init__(self, moe: FusedMoEConfig) -> None:
        self.start(moe)


def parallel_of(sizes: FusedMoEParallelConfig) -> Parallel:
    """What a rank holds and passes: vLLM's `tp_size` is that of experts, and counts all ranks
    without expert parallelism, those with data of their own, too.
    """
    if sizes.tp_size == 1:
        return "expert"
    return "tensor" if sizes.dp_size == 1 else "sharded_tokens"


def config_of(
    moe: FusedMoEConfig,
    weight_format: WeightFormat | None,
    activation_format: ActivationFormat | None = None,
) -> MoEConfig:
    """The config of a layer's whole experts; `ValueError` for what moeos does not compute."""
    sizes = moe.moe_parallel_config
    activation = moe.activation.value
    try:
        cfg = MoEConfig(
            hidden=moe.hidden_dim,
            intermediate=moe.intermediate_size_per_partition * sizes.tp_size,
            experts=moe.num_experts,
            top_k=moe.experts_per_token,
            activation=shared.activation_of(WHERE, activation, ACTIVATIONS),
            dtype=moe.in_dtype,
            max_tokens=moe.max_num_tokens,
            swiglu_limit=moe.swiglu_limit,
            bias=moe.has_bias,
            routing="caller",
            gate_up="interleaved" if activation == INTERLEAVED else "concatenated",
            weight_format=weight_format,
            activation_format=activation_format,
        )
    except (TypeError, ValueError) as error:
        if activation_format is None:
            raise
        raise type(error)(f"{WHERE}, activation_format of additional_config: {error}") from None
    shared.require_slices(WHERE, cfg, parallel_of(sizes), sizes.tp_size, WHOLE)
    return cfg


def require_placement(layer: Any, weight_format: WeightFormat | None) -> None:
    """`ValueError` unless rank r holds the experts r*X ... r*X + X-1 in the dtype of tokens, or in
    a format.
    """
    placement = layer.expert_map_manager.placement_strategy
    if placement != "linear":
        raise shared.refusal(
            WHERE, "expert_placement_strategy", placement, "--expert-placement-strategy linear does"
        )
    moe = layer.moe_config
    if weight_format is None and layer.w13_weight.dtype != moe.in_dtype:
        raise shared.refusal(
            WHERE,
            "the experts' dtype",
            layer.w13_weight.dtype,
            f"that of the activations does, {moe.in_dtype}",
        )


def refuse_unsupported(moe: FusedMoEConfig, weight_format: WeightFormat | None) -> None:
    """`ValueError` for what a deployment asks of the experts and moeos does not do."""
    parallel = moe.moe_parallel_config
    vllm_config = get_current_vllm_config()
    swiglu_oai = moe.activation.value == "swigluoai_uninterleave"
    cases: list[tuple[bool, str, object, str]] = [
        (parallel.pcp_size > 1, "prefill_context_parallel_size", parallel.pcp_size, "1 does"),
        (parallel.enable_eplb, "enable_eplb", True, "leave --enable-eplb out"),
        (moe.is_lora_enabled, "enable_lora", True, "merge the adapter into the weights"),
        (
            vllm_config.parallel_config.enable_dbo,
            "enable_dbo",
            True,
            "leave --enable-dbo out: a layer's calls are one after the other",
        ),
        (
            moe.num_experts % parallel.ep_size != 0,
            "num_experts",
            moe.num_experts,
            f"a number of ranks that divides it does; there are {parallel.ep_size}",
        ),
        (
            moe.skip_final_all_reduce,
            "reduce_results",
            False,
            "the experts' output is complete on every rank, and reduce_results=True takes it so",
        ),
        (
            not swiglu_oai and moe.swiglu_alpha not in (None, 1.0),
            "swiglu_alpha",
            moe.swiglu_alpha,
            "None does",
        ),
        (
            not swiglu_oai and moe.swiglu_beta not in (None, 0.0),
            "swiglu_beta",
            moe.swiglu_beta,
            "None does",
        ),
        (swiglu_oai and moe.swiglu_alpha != 1.702, "swiglu_alpha", moe.swiglu_alpha, "1.702 does"),
        (swiglu_oai and moe.swiglu_beta != 1.0, "swiglu_beta", moe.swiglu_beta, "1.0 does"),
        (
            moe.activation.value == INTERLEAVED and weight_format not in (None, "mxfp4"),
            f"weight_format with activation {INTERLEAVED!r}",
            weight_format,
            "gpt-oss in MXFP4 or bfloat16 does",
        ),
    ]
    for refused, field, value, works in cases:
        if refused:
            raise shared.refusal(WHERE, field, value, works)
    shared.activation_of(WHERE, moe.activation.value, ACTIVATIONS)
