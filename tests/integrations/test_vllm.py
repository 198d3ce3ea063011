# SPDX-License-Identifier: Apache-2.0
"""The vLLM adapter against a stand-in of vLLM 0.32.0, on the twin, compared with float64.

`test_vllm_itself.py` runs vLLM.
"""

from __future__ import annotations

import re
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from moeos import MoEConfig
from tests.integrations.stand_ins import Tensors, in_fork, on_ranks, slice_of
from tests.nightly import all_but, in_turn

HIDDEN, INTERMEDIATE, EXPERTS, MAX_TOKENS = 64, 96, 8, 40


class Job:
    """What vLLM makes of a deployment on this rank: groups, configs and layers."""

    def __init__(
        self,
        rank: int,
        *,
        tp: int = 1,
        dp: int = 1,
        sequence_parallel: bool = False,
        options: dict[str, Any] | None = None,
        quantization_config: dict[str, Any] | None = None,
        **parallel: Any,
    ) -> None:
        from vllm import config, distributed
        from vllm.model_executor.layers import quantization
        from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

        import moeos.integrations.vllm as plugin

        plugin.register()
        plugin.register()  # vLLM may do so again
        self.quant = quantization.get_quantization_config("moeos").from_config(
            quantization_config or {}
        )
        self.ranks = tp * dp
        whole = parallel.pop("enable_expert_parallel", True) and self.ranks > 1
        distributed.start_groups(tp)
        self.parallel = FusedMoEParallelConfig(
            tp_size=1 if whole else self.ranks,
            pcp_size=parallel.pop("pcp_size", 1),
            dp_size=dp,
            ep_size=self.ranks if whole else 1,
            tp_rank=0 if whole else rank,
            pcp_rank=0,
            dp_rank=rank // tp,
            ep_rank=rank if whole else 0,
            sp_size=tp if sequence_parallel else 1,
            use_ep=whole,
            all2all_backend="allgather_reducescatter",
            enable_eplb=parallel.get("enable_eplb", False),
        )
        self.config = config.VllmConfig(
            config.ParallelConfig(tp, dp, whole, **parallel),
            config.SchedulerConfig(MAX_TOKENS),
            {"moeos": options or {"deadline": 60.0}},
        )

    def layer(self, tensors: Tensors, name: str = "layers.0", **changes: Any) -> Any:
        """A layer's routed experts with their weights, ready for calls unless `ready` is False."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
        from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

        cfg = tensors.cfg
        placement = ExpertMapManager(
            cfg.experts, self.parallel, changes.pop("placement_strategy", "linear")
        )
        on_input = changes.pop("apply_router_weight_on_input", False)
        params_dtype = changes.pop("params_dtype", cfg.dtype)
        ready = changes.pop("ready", True)
        activation = {"swiglu": "silu", "silu": "silu_no_mul"}.get(cfg.activation, cfg.activation)
        moe = FusedMoEConfig(
            num_experts=cfg.experts,
            experts_per_token=cfg.top_k,
            hidden_dim=cfg.hidden,
            intermediate_size=cfg.intermediate,
            num_local_experts=placement.local_num_experts,
            activation=MoEActivation(changes.pop("activation", activation)),
            moe_parallel_config=self.parallel,
            in_dtype=cfg.dtype,
            max_num_tokens=self.config.scheduler_config.max_num_batched_tokens,
            has_bias=cfg.bias,
            swiglu_limit=cfg.swiglu_limit,
            **changes,
        )
        with set_current_vllm_config(self.config):
            layer = RoutedExperts(
                name,
                params_dtype,
                moe,
                self.quant,
                placement,
                swiglu_limit=cfg.swiglu_limit,
                apply_router_weight_on_input=on_input,
            )
            first = self.parallel.ep_rank * placement.local_num_experts
            mine = slice(first, first + placement.local_num_experts)
            load(layer, tensors, mine, (self.parallel.tp_rank, self.parallel.tp_size))
            if ready:
                layer.quant_method.process_weights_after_loading(layer)
        return layer

    def forward(self, layer: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """What vLLM's runner does behind its router."""
        from vllm.distributed import tensor_model_parallel_all_reduce

        y = layer.forward_modular(x=x, topk_weights=weights, topk_ids=ids)
        reduced = layer.quant_method.moe_kernel.output_is_reduced()
        if not reduced and self.ranks > 1 and not self.parallel.is_sequence_parallel:
            y = tensor_model_parallel_all_reduce(y)
        return y


def load(layer: Any, tensors: Tensors, mine: slice, place: tuple[int, int] = (0, 1)) -> None:
    """What vLLM's loaders do with a checkpoint: gpt-oss' have gate 0, up 0, gate 1, and so on.

    `place`: which slice of how many. The first rank alone has biases of w2 then.
    """
    parts = {"w13_weight": tensors.w1, "w2_weight": tensors.w2}
    if tensors.b1 is not None and tensors.b2 is not None:
        parts |= {"w13_bias": tensors.b1, "w2_bias": tensors.b2}
    for name, (codes, scale) in tensors.codes.items():
        theirs = {"w1": "w13", "w2": "w2"}[name]
        end = "weight_scale_inv" if hasattr(layer, "w13_weight_scale_inv") else "weight_scale"
        parts |= {f"{theirs}_weight": codes, f"{theirs}_{end}": scale}
    for name, tensor in parts.items():
        tensor = slice_of(tensors.cfg, name, tensor, *place)
        if layer.activation.value == "swigluoai" and name.startswith("w13"):
            tensor = tensor.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        parameter = getattr(layer, name)
        parameter.data.copy_(tensor[mine].view(parameter.shape))


def config(**changes: Any) -> MoEConfig:
    sizes: dict[str, Any] = {
        "hidden": HIDDEN,
        "intermediate": INTERMEDIATE,
        "experts": EXPERTS,
        "top_k": 2,
        "dtype": torch.float32,
    }
    return MoEConfig(**(sizes | changes))


def test_a_fork_of_one_rank_computes_by_a_world_of_its_own() -> None:
    def live(rank: int) -> list[float]:
        tensors = Tensors(config())
        job = Job(rank)
        layer = job.layer(tensors)
        x, (ids, weights) = tensors.draw(5, HIDDEN), tensors.routing(5)

        def call() -> float:
            return tensors.error(job.forward(layer, x, ids, weights), x, ids, weights)

        first = call()
        forked = in_fork(call)
        return [first, forked, call()]

    [errors] = on_ranks(live, 1)
    assert all(error <= 1 for error in errors), errors


@pytest.mark.parametrize(
    ("ranks", "changes"), in_turn([1, 2, 4], [{}, {"dtype": torch.bfloat16, "bias": True}]), ids=str
)
def test_tensor_parallel_ranks_with_equal_tokens_have_the_whole_result(
    ranks: int, changes: dict[str, Any]
) -> None:
    def live(rank: int) -> list[float]:
        tensors = Tensors(config(**changes))
        job = Job(rank, tp=ranks)
        layer = job.layer(tensors)
        errors = []
        for rows in (MAX_TOKENS, 1, 3, 7, 32):  # also fewer rows than ranks
            x, (ids, weights) = tensors.draw(rows, HIDDEN), tensors.routing(rows)
            errors.append(tensors.error(job.forward(layer, x, ids, weights), x, ids, weights))
        return errors

    assert all(error <= 1 for errors in on_ranks(live, ranks) for error in errors)


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (2, {}),
        (3, {"dtype": torch.bfloat16, "bias": True}),
        (2, {"activation": "silu", "bias": True}),
        (2, {"experts": 7}),
    ],
    ids=str,
)
def test_tensor_parallel_ranks_without_expert_parallelism_have_slices_of_all_experts(
    ranks: int, changes: dict[str, Any]
) -> None:
    def live(rank: int) -> tuple[list[float], tuple[int, ...], str]:
        tensors = Tensors(config(**changes))
        job = Job(rank, tp=ranks, enable_expert_parallel=False)
        layer = job.layer(tensors)
        experts = layer.quant_method.moe_kernel.fused_experts._made.made
        errors = []
        for rows in (MAX_TOKENS, 1, 7):
            x, (ids, weights) = tensors.draw(rows, HIDDEN), tensors.routing(rows)
            errors.append(tensors.error(job.forward(layer, x, ids, weights), x, ids, weights))
        return errors, tuple(layer.w2_weight.shape), experts.slicing.parallel

    experts = changes.get("experts", EXPERTS)
    for errors, shape, parallel in on_ranks(live, ranks):
        assert max(errors) <= 1
        assert shape == (experts, HIDDEN, INTERMEDIATE // ranks)
        assert parallel == "tensor"


@pytest.mark.parametrize(
    ("tp", "dp", "whole"),
    all_but(
        [(2, 2, True), (1, 3, False)],
        [(1, 2, True), (1, 4, True), (2, 2, True), (1, 2, False), (1, 3, False)],
    ),
)
def test_data_parallel_ranks_have_the_results_of_their_own_tokens(
    tp: int, dp: int, whole: bool
) -> None:
    def live(rank: int) -> list[float]:
        tensors = Tensors(config(bias=not whole))
        # With both, vLLM has split the tokens among tensor-parallel ranks already.
        job = Job(rank, tp=tp, dp=dp, sequence_parallel=tp > 1, enable_expert_parallel=whole)
        layer = job.layer(tensors)
        experts = layer.quant_method.moe_kernel.fused_experts._made.made
        assert experts.slicing.parallel == ("expert" if whole else "sharded_tokens")
        errors = []
        for step in range(3):
            for source in range(tp * dp):  # drawn alike by all
                rows = 1 + (7 * source + 11 * step) % MAX_TOKENS
                x, (ids, weights) = tensors.draw(rows, HIDDEN), tensors.routing(rows)
                if source == rank:
                    mine = x, ids, weights
            errors.append(tensors.error(job.forward(layer, *mine), *mine))
        return errors

    assert all(error <= 1 for errors in on_ranks(live, tp * dp) for error in errors)


def test_slices_of_ranks_of_which_some_have_equal_tokens_have_the_whole_result() -> None:
    """Both kinds of parallelism, and no expert parallelism, which would split equal tokens."""

    def live(rank: int) -> list[float]:
        tensors = Tensors(config(bias=True))
        job = Job(rank, tp=2, dp=2, enable_expert_parallel=False)
        layer = job.layer(tensors)
        errors = []
        for rows in (MAX_TOKENS, 1, 7):
            for replica in range(2):  # drawn alike by all
                x, (ids, weights) = tensors.draw(rows, HIDDEN), tensors.routing(rows)
                if replica == rank // 2:
                    mine = x, ids, weights
            errors.append(tensors.error(job.forward(layer, *mine), *mine))
        return errors

    assert all(error <= 1 for errors in on_ranks(live, 4) for error in errors)


@pytest.mark.parametrize(
    "changes",
    [
        {"activation": "silu"},
        {"activation": "gelu_tanh"},
        {"swiglu_limit": 0.5},
        {"activation": "swigluoai", "bias": True, "dtype": torch.bfloat16},
        {"top_k": 8},
    ],
    ids=str,
)
def test_layers_of_other_kinds_are_right(changes: dict[str, Any]) -> None:
    def live(rank: int) -> float:
        tensors = Tensors(config(**changes))
        name = {"gelu_tanh": "gelu_tanh_no_mul", "silu": "silu_no_mul"}
        job = Job(rank)
        layer = job.layer(
            tensors,
            **({"activation": name[tensors.cfg.activation]} if not tensors.cfg.gated else {}),
        )
        x, (ids, weights) = tensors.draw(20, HIDDEN), tensors.routing(20)
        return tensors.error(job.forward(layer, x, ids, weights), x, ids, weights)

    assert on_ranks(live, 1)[0] <= 1


def test_the_router_s_weight_multiplies_the_input_where_the_layer_says_so() -> None:
    def live(rank: int) -> float:
        tensors = Tensors(config(top_k=1))
        job = Job(rank, tp=2)
        layer = job.layer(tensors, apply_router_weight_on_input=True)
        x, (ids, _) = tensors.draw(9, HIDDEN), tensors.routing(9)
        weights = torch.rand(9, 1, generator=tensors.generator)
        y = job.forward(layer, x, ids, weights)
        return tensors.error(y, x * weights, ids, torch.ones(9, 1))

    assert max(on_ranks(live, 2)) <= 1


def test_layers_of_a_model_share_a_world_and_weights_may_be_loaded_again() -> None:
    def live(rank: int) -> list[float]:
        job = Job(rank, tp=2)
        models = [Tensors(config(), seed) for seed in range(3)]
        layers = [job.layer(model, f"layers.{i}") for i, model in enumerate(models)]
        kernels = [layer.quant_method.moe_kernel.fused_experts for layer in layers]
        assert len({id(kernel._made.made) for kernel in kernels}) == 1
        errors = []
        for model, layer in zip(models, layers, strict=True):
            x, (ids, weights) = model.draw(12, HIDDEN), model.routing(12)
            errors.append(model.error(job.forward(layer, x, ids, weights), x, ids, weights))
        mine = slice(rank * 4, rank * 4 + 4)
        layers[0].w13_weight.data.copy_(models[1].w1[mine])
        layers[0].w2_weight.data.copy_(models[1].w2[mine])
        layers[0].quant_method.process_weights_after_loading(layers[0])
        x, (ids, weights) = models[1].draw(12, HIDDEN), models[1].routing(12)
        errors.append(models[1].error(job.forward(layers[0], x, ids, weights), x, ids, weights))
        return errors

    assert all(error <= 1 for errors in on_ranks(live, 2) for error in errors)


def test_linear_layers_are_vllm_s_and_all_others_too() -> None:
    def live(rank: int) -> tuple[str, Any]:
        from vllm.model_executor.layers.linear import LinearBase

        quant = Job(rank).quant
        linear = quant.get_quant_method(LinearBase(), "lm")
        return type(linear).__name__, quant.get_quant_method(torch.nn.Embedding(2, 2), "lm")

    assert on_ranks(live, 1) == [("UnquantizedLinearMethod", None)]


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"pcp_size": 2}, {}, "prefill_context_parallel_size is 2"),
    ({"enable_eplb": True}, {}, "enable_eplb is True"),
    ({"enable_dbo": True}, {}, "enable_dbo is True"),
    ({}, {"is_lora_enabled": True}, "enable_lora is True.*merge"),
    ({}, {"skip_final_all_reduce": True}, "reduce_results is False"),
    (
        {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
        {"activation": "swigluoai"},
        "weight_format with activation 'swigluoai' is 'fp8_tensor'.*gpt-oss in MXFP4",
    ),
    ({}, {"activation": "situ"}, "activation is 'situ'"),
    ({}, {"swiglu_alpha": 1.5}, "swiglu_alpha is 1.5"),
    ({}, {"swiglu_beta": 1.0}, "swiglu_beta is 1.0"),
    ({}, {"placement_strategy": "round_robin"}, "expert_placement_strategy is 'round_robin'"),
    ({}, {"params_dtype": torch.bfloat16}, "experts' dtype is torch.bfloat16.*torch.float32"),
    ({"options": {"deadlin": 3}}, {}, "additional_config.*deadlin.*backend, deadline, activation"),
]


@pytest.mark.parametrize(("job", "changes", "sentence"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_done_is_refused_by_name_value_and_remedy(
    job: dict[str, Any], changes: dict[str, Any], sentence: str
) -> None:
    ranks = job.get("tp", 1)

    def live(rank: int) -> None:
        Job(rank, **job).layer(Tensors(config()), **changes)

    with pytest.raises(ValueError, match=sentence) as raised:
        on_ranks(live, ranks)
    assert str(raised.value).isascii()
    assert str(raised.value).startswith("vLLM with --quantization moeos: ")


def test_experts_that_ranks_cannot_share_equally_are_refused() -> None:
    def live(rank: int) -> None:
        Job(rank, tp=2).layer(Tensors(config(experts=7)))

    with pytest.raises(ValueError, match=r"num_experts is 7.*there are 2"):
        on_ranks(live, 2)


def test_experts_that_ranks_cannot_cut_equally_are_refused() -> None:
    def live(rank: int) -> None:
        job = Job(rank, tp=2, enable_expert_parallel=False)
        job.layer(Tensors(config(intermediate=24)))

    match = r"moeos: intermediate is 24; 2 ranks .* a multiple of 16.*: --enable-expert-parallel"
    with pytest.raises(ValueError, match=match):
        on_ranks(live, 2)


FP8_BLOCKS = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["layers.plain"],
}
FP8_MATRIX = {"quant_method": "fp8", "activation_scheme": "dynamic"}
MXFP4 = {"quant_method": "gpt_oss_mxfp4"}  # as vLLM calls what the checkpoint calls mxfp4


QUANTISED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "blocks": (FP8_BLOCKS, {"weight_format": "fp8_block128"}, "silu"),
    "matrices": (FP8_MATRIX, {"weight_format": "fp8_tensor", "dtype": torch.bfloat16}, "silu"),
    "without a gate": (
        FP8_MATRIX,
        {"weight_format": "fp8_tensor", "activation": "relu2"},
        "relu2_no_mul",
    ),
    "mxfp4": (
        MXFP4,
        {
            "weight_format": "mxfp4",
            "activation": "swigluoai",
            "bias": True,
            "dtype": torch.bfloat16,
        },
        "swigluoai",
    ),
}


@pytest.mark.parametrize(
    ("name", "world"), in_turn(QUANTISED, [(1, True), (2, True), (2, False)]), ids=str
)
def test_experts_of_a_quantised_checkpoint_are_right_as_they_are_shipped(
    name: str, world: tuple[int, bool]
) -> None:
    checkpoint, changes, activation = QUANTISED[name]
    ranks, whole = world

    def live(rank: int) -> tuple[list[float], Any, bool]:
        job = Job(rank, tp=ranks, quantization_config=checkpoint, enable_expert_parallel=whole)
        models = [Tensors(config(intermediate=256, **changes), seed) for seed in range(2)]
        layer = job.layer(models[0], activation=activation)
        codes = layer.w13_weight
        errors = []
        for model in models:
            if model is models[1]:  # weights are loaded again
                local = EXPERTS // job.parallel.ep_size
                first = job.parallel.ep_rank * local
                place = job.parallel.tp_rank, job.parallel.tp_size
                load(layer, model, slice(first, first + local), place)
                layer.quant_method.process_weights_after_loading(layer)
            for rows in (MAX_TOKENS, 3):
                x, (ids, weights) = model.draw(rows, HIDDEN), model.routing(rows)
                errors.append(model.error(job.forward(layer, x, ids, weights), x, ids, weights))
        experts = layer.quant_method.moe_kernel.fused_experts._made.made
        return errors, experts.cfg.weight_format, codes is layer.w13_weight

    for errors, weight_format, in_place in on_ranks(live, ranks):
        assert max(errors) <= 1
        assert weight_format == changes["weight_format"]
        assert in_place


def _again(layer: Any) -> None:
    """Other parameters in the place of a layer's, and other memory in that of the others'."""
    for name, one in list(layer.named_parameters()):
        if name.startswith("w13"):
            layer.register_parameter(name, torch.nn.Parameter(one.data.clone(), False))
        else:
            one.data = one.data.clone()


ORDERS: dict[str, list[str]] = {
    "processed twice": ["load", "process", "process", "call", "process", "call"],
    "loaded again and not processed": ["load", "process", "call", "load", "call"],
    "processed before they are loaded": ["process", "load", "call"],
    "loaded again and processed twice": ["load", "process", "load", "process", "process", "call"],
    "in other parameters": ["load", "process", "call", "again", "load", "call", "load", "call"],
}


@pytest.mark.parametrize("name", [*QUANTISED, "numbers", "gpt-oss in numbers"])
def test_a_call_is_right_in_every_order_of_loading_and_processing(name: str) -> None:
    in_numbers = {
        "numbers": ({}, {}, "silu"),
        "gpt-oss in numbers": ({}, {"activation": "swigluoai", "bias": True}, "swigluoai"),
    }
    checkpoint, changes, activation = (QUANTISED | in_numbers)[name]

    def live(rank: int) -> dict[str, float]:
        models = [Tensors(config(intermediate=256, **changes), seed) for seed in range(3)]
        job = Job(rank, quantization_config=checkpoint)
        worst = {}
        for order, steps in ORDERS.items():
            layer = job.layer(models[0], activation=activation, ready=False)
            kept, errors = iter(models[1:] * 2), []
            for step in steps:
                if step == "load":
                    model = next(kept)
                    load(layer, model, slice(0, EXPERTS))
                elif step == "process":
                    layer.quant_method.process_weights_after_loading(layer)
                elif step == "again":
                    _again(layer)
                else:
                    x, (ids, weights) = model.draw(5, HIDDEN), model.routing(5)
                    y = job.forward(layer, x, ids, weights)
                    errors.append(model.error(y, x, ids, weights))
            worst[order] = max(errors)
        return worst

    [worst] = on_ranks(live, 1)
    assert max(worst.values()) <= 1, worst


@pytest.mark.parametrize("name", QUANTISED)
def test_neither_processing_nor_calls_change_a_parameter(name: str) -> None:
    checkpoint, changes, activation = QUANTISED[name]

    def live(rank: int) -> bool:
        model = Tensors(config(intermediate=256, **changes))
        job = Job(rank, quantization_config=checkpoint)
        layer = job.layer(model, activation=activation, ready=False)

        def state() -> list[Any]:
            return [
                (
                    *(key, id(one), type(one), one.dtype, one.shape, one.stride(), one.data_ptr()),
                    *(sorted(vars(one)), one._version),
                    bytes(one.detach().contiguous().view(torch.uint8).flatten().tolist()),
                )
                for key, one in layer.named_parameters()
            ]

        before = state()
        layer.quant_method.process_weights_after_loading(layer)
        for _ in range(3):
            job.forward(layer, model.draw(5, HIDDEN), *model.routing(5))
        return state() == before and not dict(layer.named_buffers())

    assert on_ranks(live, 1) == [True]


@pytest.mark.parametrize("name", QUANTISED)
def test_a_call_of_weights_that_were_never_processed_is_refused(name: str) -> None:
    checkpoint, changes, activation = QUANTISED[name]

    def live(rank: int) -> None:
        model = Tensors(config(intermediate=256, **changes))
        job = Job(rank, quantization_config=checkpoint)
        layer = job.layer(model, activation=activation, ready=False)
        job.forward(layer, model.draw(5, HIDDEN), *model.routing(5))

    with pytest.raises(RuntimeError, match=r"layers\.0 has no kernel.*process_weights_after"):
        on_ranks(live, 1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_option_has_experts_multiply_fp8_by_fp8(ranks: int) -> None:
    coded = {"weight_format": "fp8_block128", "activation_format": "fp8_group128"}
    sizes = {"hidden": 128, "intermediate": 256, "dtype": torch.bfloat16}

    def live(rank: int) -> tuple[float, float]:
        options = {"deadline": 60.0, "activation_format": "fp8_group128"}
        job = Job(rank, tp=ranks, quantization_config=FP8_BLOCKS, options=options)
        model = Tensors(config(**sizes, **coded))
        in_numbers = Tensors(config(**sizes, **coded | {"activation_format": None}))
        layer = job.layer(model, activation="silu")
        x, (ids, weights) = model.draw(MAX_TOKENS, 128), model.routing(MAX_TOKENS)
        y = job.forward(layer, x, ids, weights)
        return model.error(y, x, ids, weights), in_numbers.error(y, x, ids, weights)

    for error, unrounded in on_ranks(live, ranks):
        assert error <= 1
        assert unrounded > 2  # rounded they are


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("fp8_group128", "weight_format is None; it must be one of fp8_block128"),
        ("fp8", "activation_format is 'fp8'; it must be one of fp8_group128"),
    ],
)
def test_that_option_needs_experts_in_fp8(given: str, said: str) -> None:
    def live(rank: int) -> None:
        Job(rank, options={"activation_format": given}).layer(Tensors(config()))

    where = "vLLM with --quantization moeos, activation_format of additional_config: "
    with pytest.raises(ValueError, match=where + said):
        on_ranks(live, 1)


def test_all_else_of_a_quantised_checkpoint_is_vllm_s() -> None:
    def live(rank: int) -> list[str]:
        from vllm.model_executor.layers.linear import LinearBase

        job = Job(rank, quantization_config=FP8_BLOCKS)
        plain = job.layer(Tensors(config()), "layers.plain")
        linear = job.quant.get_quant_method(LinearBase(), "lm")
        names = [type(one).__name__ for one in (linear, plain.quant_method)]
        return [job.quant.get_name(), *names]

    assert on_ranks(live, 1) == [["fp8", "Fp8LinearMethod", "MoeosMethod"]]


def test_moeos_takes_a_quantised_checkpoint_where_it_was_asked_for_and_can() -> None:
    def live(rank: int) -> list[Any]:
        quant = type(Job(rank).quant)
        gpt_oss = types.SimpleNamespace(model_type="gpt_oss")
        found = [
            quant.override_quantization_method(FP8_BLOCKS, "fp8"),
            quant.override_quantization_method(FP8_BLOCKS, "moeos", hf_config=gpt_oss),
            quant.override_quantization_method({"quant_method": "mxfp4"}, "moeos", gpt_oss),
        ]
        deepseek = types.SimpleNamespace(model_type="deepseek_v4")
        refused = [({"quant_method": name}, None) for name in ("awq", "mxfp4")]
        for checkpoint, model in (*refused, (FP8_BLOCKS, deepseek)):
            with pytest.raises(ValueError, match="which moeos does not do") as raised:
                quant.override_quantization_method(checkpoint, "moeos", model)
            found.append(str(raised.value))
        return found

    (found,) = on_ranks(live, 1)
    assert found[:3] == [None, "moeos", "moeos"]
    assert re.search(r"quant_method is 'awq'.*'fp8', or the model's bfloat16", found[3])
    assert re.search("mxfp4 of a model_type is None.*gpt_oss", found[4])
    assert re.search("fp8 of a model_type is 'deepseek_v4'.*deepseek_v3", found[5])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"activation_scheme": "static"}, "activation_scheme is 'static'.*input_scale is not used"),
        ({"weight_block_size": [64, 64]}, r"weight_block_size is \[64, 64\].*\[128, 128\]"),
        ({"store_dtype": "mxfp4"}, "store_dtype is 'mxfp4'.*none does"),
        ({"fmt": "e5m2"}, "fmt is 'e5m2'.*'e4m3' does"),
    ],
)
def test_a_quantised_checkpoint_that_moeos_does_not_compute_is_refused_by_its_field(
    changes: dict[str, Any], sentence: str
) -> None:
    def live(rank: int) -> None:
        Job(rank, quantization_config=FP8_BLOCKS | changes)

    with pytest.raises(ValueError, match=f"the checkpoint's quantization_config: {sentence}"):
        on_ranks(live, 1)


def test_sizes_that_a_format_does_not_have_are_refused() -> None:
    def live(rank: int) -> None:
        cfg = config(intermediate=256, hidden=72, weight_format=None)
        Job(rank, quantization_config=FP8_MATRIX).layer(Tensors(cfg))

    with pytest.raises(ValueError, match="hidden is 72; it must be a multiple of 16 with"):
        on_ranks(live, 1)
