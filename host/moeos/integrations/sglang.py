# SPDX-License-Identifier: Apache-2.0
"""SGLang's expert layers on moeos: `--moe-runner-backend moeos`, or `moeos_fp8`.

SGLang calls `register` in each of its processes, by the entry point `sglang.srt.plugins`. It adds a
runner core by SGLang's registry, and hooks by which a layer without quantisation, or in FP8, takes
that core and keeps the numbers that experts have over all ranks. It was written for the version
below. This file must not depend on how ranks communicate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moeos.config.config import MoEConfig
from moeos.config.element_formats import BLOCK, ActivationFormat, WeightFormat
from moeos.integrations import shared
from moeos.layer.experts import Experts

VERSION = "0.5.23"
"""The version of SGLang whose interfaces this was written for."""

NAME = shared.NAME
"""The name of the runner backend."""

reset = shared.reset

FP8_NAME = f"{NAME}_fp8"
"""The name of the runner backend whose experts get quantized tokens, too."""

try:
    from sglang.srt.arg_groups.choices import add_moe_runner_backend_choices
    from sglang.srt.layers.moe.moe_runner import register_moe_runner_core
    from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore, MoeRunnerConfig
    from sglang.srt.layers.moe.moe_runner.runner import MoeRunner
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
    from sglang.srt.layers.moe.topk import TopKOutputChecker
    from sglang.srt.layers.moe.utils import (
        RegisteredMoeRunnerBackend,
        get_moe_a2a_backend,
        get_moe_runner_backend,
        is_tbo_enabled,
    )
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.runtime_context import get_exec, get_lora, get_parallel, get_schedule
    from sglang.srt.utils import is_cuda
except ImportError as error:
    raise shared.missing("sglang", "sglang", VERSION) from error

WHERE = "SGLang with --moe-runner-backend moeos"

ACTIVATIONS = {
    "silu": "swiglu",
    "gelu_tanh": "geglu_tanh",
    "silu without a gate": "silu",
    "gelu without a gate": "gelu",
    "gelu_tanh without a gate": "gelu_tanh",
    "relu2 without a gate": "relu2",
}
"""SGLang's name of an activation -> that of moeos."""

_UNQUANTISED = "sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod"
_FP8 = "sglang.srt.layers.quantization.fp8.Fp8MoEMethod"
_WHOLE = "--ep-size equal to --tp-size gives each rank whole experts"
_WORKS = "serve the model's FP8 checkpoint, or its bfloat16 or float16 one"
_LAYER = "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE"
_GLOBAL_IDS = "sglang.srt.layers.moe.token_dispatcher.standard._keeps_global_expert_ids"

_registered = False


class MoeosRunnerCore(DispatchMoeRunnerCore):
    """The experts of a layer, on the ranks of SGLang's expert-parallel group.

    All of these hold the same tokens and add up what they return. So each computes its part of the
    tokens with all experts, and returns zeros for the others: the sum gathers the parts. Without
    expert parallelism each tensor-parallel rank holds a slice of every expert. Then moeos adds up
    what these make of all tokens, and each rank returns its part of the sums, and zeros.
    """

    name = NAME
    activation_format: ActivationFormat | None = None

    def __init__(self, config: MoeRunnerConfig) -> None:
        """Makes the world, with the first layer, and the experts. Collective over the group."""
        refuse_unsupported(config)
        super().__init__(config)
        parallel, schedule = get_parallel(), get_schedule()
        sliced = parallel.moe_tp_size > 1
        ranks = parallel.moe_tp_size if sliced else parallel.moe_ep_size
        tokens = schedule.chunked_prefill_size
        if tokens is None or tokens <= 0:
            tokens = schedule.max_prefill_tokens
        groups = parallel.moe_tp_group if sliced else parallel.moe_ep_group
        group = groups.cpu_group if ranks > 1 else None
        backend = "cuda" if is_cuda() else "twin"
        most = tokens if sliced else max(1, -(-tokens // ranks))

        def make() -> Experts:
            world = shared.world_of(group, backend, shared.SERVER_DEADLINE)
            cfg = config_of(config, most, self.activation_format)
            if sliced:
                shared.require_slices(WHERE, cfg, "tensor", ranks, _WHOLE)
                return shared.experts_of(cfg, world, "tensor", "scattered")
            return shared.experts_of(cfg, world)

        self._made = shared.OfProcess(make)

    @property
    def runner_backend(self) -> RegisteredMoeRunnerBackend:
        return RegisteredMoeRunnerBackend(self.name)

    def run_from_dispatch(
        self,
        dispatch_output: Any,
        quant_info: Any,
        runner_config: MoeRunnerConfig,
        hooks: Any = None,
    ) -> StandardCombineInput:
        """[rows, H]: this rank's part of the sum over the ranks."""
        if hooks is not None:
            raise shared.refusal(
                WHERE, "hooks of LoRA", hooks, "merge the adapter into the weights"
            )
        x, routing = dispatch_output.hidden_states, dispatch_output.topk_output
        if not TopKOutputChecker.format_is_standard(routing):
            raise shared.refusal(
                WHERE, "the format of topk_output", routing.format, "STANDARD does"
            )
        ids, weights = routing.topk_ids, routing.topk_weights
        if runner_config.apply_router_weight_on_input:  # with one expert a token
            x = x * weights.to(x.dtype)
            weights = torch.ones_like(weights)
        if runner_config.routed_scaling_factor is not None:
            weights = weights * runner_config.routed_scaling_factor
        w13_scale, w2_scale = quant_info.w13_scale, quant_info.w2_scale
        experts = self._made.here()
        if experts.cfg.weight_format == "fp8_tensor":
            w2_scale = w2_scale.unsqueeze(1)  # a number for each half of a matrix, of which it is 1
        world, rows, room = experts.world, x.shape[0], experts.cfg.max_tokens
        y = torch.zeros_like(x)

        def run(start: int, stop: int, pieces: int = 1) -> Tensor:
            return experts(
                x[start:stop],
                ids[start:stop],
                weights[start:stop],
                quant_info.w13_weight,
                quant_info.w2_weight,
                w1_scale=w13_scale,
                w2_scale=w2_scale,
                pieces=pieces,
            )

        if experts.scatters:
            for start in range(0, rows, room):
                stop = min(rows, start + room)
                first, end, _ = shared.part(stop - start, world.rank, world.size)
                y[start + first : start + end] = run(start, stop)
        else:
            first, end, most = shared.part(rows, world.rank, world.size)
            y[first:end] = run(first, end, max(1, -(-most // room)))
        return StandardCombineInput(hidden_states=y)


class MoeosFp8RunnerCore(MoeosRunnerCore):
    """Runs experts in FP8 by W8A8: tokens are quantized, too."""

    name = FP8_NAME
    activation_format: ActivationFormat | None = "fp8_group128"


def config_of(
    config: MoeRunnerConfig, max_tokens: int, activation_format: ActivationFormat | None = None
) -> MoEConfig:
    """The config of a layer's experts; `ValueError` for what moeos does not compute."""
    try:
        return MoEConfig(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size_per_partition * get_parallel().moe_tp_size,
            experts=config.num_experts,
            top_k=config.top_k,
            activation=shared.activation_of(WHERE, _activation(config), ACTIVATIONS),
            dtype=config.params_dtype,
            max_tokens=max_tokens,
            swiglu_limit=config.swiglu_limit,
            routing="caller",
            weight_format=weight_format_of(config),
            activation_format=activation_format,
        )
    except (TypeError, ValueError) as error:
        if activation_format is None:
            raise
        instead = f"--moe-runner-backend {NAME} has no such rule"
        raise type(error)(
            f"SGLang with --moe-runner-backend {FP8_NAME}: {error}; {instead}"
        ) from None


def weight_format_of(config: MoeRunnerConfig) -> WeightFormat | None:
    """The format of a layer's weights; `ValueError` for one that moeos does not compute."""
    method: Any = config.layer.quant_method if config.layer is not None else None
    name = type(method).__name__
    if name == _UNQUANTISED.rpartition(".")[2]:
        return None
    if name != _FP8.rpartition(".")[2]:
        raise shared.refusal(WHERE, "quant_method", name, _WORKS)
    of_checkpoint = method.quant_config
    block = of_checkpoint.weight_block_size
    cases: list[tuple[bool, str, object, str]] = [
        (
            not of_checkpoint.is_checkpoint_fp8_serialized,
            "is_checkpoint_fp8_serialized",
            False,
            "a checkpoint in FP8 does, or the model without --quantization",
        ),
        (
            of_checkpoint.activation_scheme != "dynamic",
            "activation_scheme",
            of_checkpoint.activation_scheme,
            "'dynamic' does: an input_scale is not used, as activations are not quantised",
        ),
        (method.use_mxfp8, "use_mxfp8", True, "FP8 with scales in float32 does"),
        (method.is_fp4_expert, "is_fp4_experts", True, "experts in FP8 do"),
        (
            block is not None and [*block] != [BLOCK, BLOCK],
            "weight_block_size",
            block,
            f"{[BLOCK, BLOCK]} and None do",
        ),
    ]
    for refused, field, value, works in cases:
        if refused:
            raise shared.refusal(WHERE, field, value, works)
    return "fp8_tensor" if block is None else "fp8_block128"


def refuse_unsupported(config: MoeRunnerConfig) -> None:
    """Raises `ValueError` for deployment options that moeos does not support."""
    weight_format_of(config)
    parallel = get_parallel()
    on_input = config.apply_router_weight_on_input
    cases: list[tuple[bool, str, object, str]] = [
        (
            parallel.moe_tp_size > 1 and parallel.moe_ep_size > 1,
            "moe_tp_size beside an --ep-size of several ranks",
            parallel.moe_tp_size,
            f"{_WHOLE}, and --ep-size 1 slices of all",
        ),
        (
            not get_moe_a2a_backend().is_none(),
            "moe_a2a_backend",
            get_moe_a2a_backend().value,
            "none does: moeos sends the tokens",
        ),
        (
            bool(config.num_fused_shared_experts),
            "num_fused_shared_experts",
            config.num_fused_shared_experts,
            "--disable-shared-experts-fusion",
        ),
        (bool(get_exec().moe.enable_eplb), "enable_eplb", True, "leave --enable-eplb out"),
        (
            bool(get_lora().enable_lora or get_lora().lora_paths),
            "enable_lora",
            True,
            "merge the adapter into the weights",
        ),
        (
            is_tbo_enabled(),
            "enable_two_batch_overlap",
            True,
            "leave it out: a layer's calls are one after the other",
        ),
        (config.no_combine, "no_combine", True, "the experts' outputs are added up"),
        (
            on_input and config.top_k != 1,
            "apply_router_weight_on_input with top_k",
            config.top_k,
            "1 does",
        ),
        (
            bool(getattr(config.layer, "with_bias", False)),
            "with_bias",
            True,
            "experts without biases do",
        ),
        (config.gemm1_alpha is not None, "gemm1_alpha", config.gemm1_alpha, "None does"),
        (
            config.gemm1_clamp_limit is not None,
            "gemm1_clamp_limit",
            config.gemm1_clamp_limit,
            "None does",
        ),
    ]
    for refused, field, value, works in cases:
        if refused:
            raise shared.refusal(WHERE, field, value, works)
    shared.activation_of(WHERE, _activation(config), ACTIVATIONS)


def _activation(config: MoeRunnerConfig) -> str:
    return f"{config.activation}" + ("" if config.is_gated else " without a gate")


def _is_moeos(backend: Any) -> bool:
    return backend is not None and backend.value in (NAME, FP8_NAME)


def _create_moe_runner(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps a method's choice of core: with `--moe-runner-backend moeos` it takes ours."""
    method, _, config = (*args, *kwargs.values())
    backend = get_moe_runner_backend()
    if not _is_moeos(backend):
        return original(*args, **kwargs)
    method.moe_runner_config = config
    method.runner = MoeRunner(backend, config)
    return None


def _leave_weights(original: Callable[..., Any], method: Any, layer: Any) -> Any:
    """Wraps what a method does after loading: for our core, weights stay as they are."""
    return None if _is_moeos(get_moe_runner_backend()) else original(method, layer)


def _apply_fp8(original: Callable[..., Any], method: Any, layer: Any, dispatch_output: Any) -> Any:
    """Wraps the FP8 method's call: our core takes weights in the layout of Triton's."""
    if not _is_moeos(get_moe_runner_backend()):
        return original(method, layer=layer, dispatch_output=dispatch_output)
    return method.runner.run(dispatch_output, method.get_triton_quant_info(layer))


def _keeps_global_expert_ids(original: Callable[..., Any], backend: Any) -> Any:
    """Wraps the dispatcher: ids stay numbered over all ranks for our core."""
    return _is_moeos(backend) or original(backend)


def _require_moeos(result: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
    """Raises, after a layer's construction, if it computes by anything else where moeos was asked
    for.
    """
    if _is_moeos(get_moe_runner_backend()) and not _is_moeos(layer.runner_backend):
        raise shared.refusal(
            WHERE,
            "quant_method",
            type(layer.quant_method).__name__,
            _WORKS,
        )


def register() -> None:
    """Makes SGLang know `--moe-runner-backend moeos` and `moeos_fp8`. May be called again."""
    global _registered
    if _registered:
        return
    for method in (_UNQUANTISED, _FP8):
        HookRegistry.register(f"{method}.create_moe_runner", _create_moe_runner, HookType.AROUND)
        after = f"{method}.process_weights_after_loading"
        HookRegistry.register(after, _leave_weights, HookType.AROUND)
    HookRegistry.register(f"{_FP8}.apply", _apply_fp8, HookType.AROUND)
    HookRegistry.register(_GLOBAL_IDS, _keeps_global_expert_ids, HookType.AROUND)
    HookRegistry.register(f"{_LAYER}.__init__", _require_moeos, HookType.AFTER)
    for core in (MoeosRunnerCore, MoeosFp8RunnerCore):
        register_moe_runner_core(core.name, core)
        add_moe_runner_backend_choices([core.name])
    _registered = True
