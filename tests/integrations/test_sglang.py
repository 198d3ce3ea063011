# SPDX-License-Identifier: Apache-2.0
"""The SGLang adapter against a stand-in of SGLang 0.5.23, on the twin, compared with float64."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor

import moeos
from moeos import MoEConfig
from tests.integrations.stand_ins import Tensors, in_fork, on_ranks, slice_of
from tests.nightly import covering, in_turn
from tests.processes import ROOT

HIDDEN, INTERMEDIATE, EXPERTS, PREFILL = 64, 96, 8, 40


class Server:
    """What SGLang makes of a deployment on this rank."""

    def __init__(self, rank: int, ranks: int = 1, backend: str = "moeos", **context: Any) -> None:
        from sglang.srt import runtime_context
        from sglang.srt.arg_groups.choices import MOE_RUNNER_BACKEND_CHOICES
        from sglang.srt.plugins.hook_registry import HookRegistry

        import moeos.integrations.sglang as plugin

        plugin.register()
        plugin.register()  # a process may load plugins again
        HookRegistry.apply_hooks()
        for name in ("moeos", "moeos_fp8"):
            assert MOE_RUNNER_BACKEND_CHOICES.count(name) == 1
        self.ranks = ranks
        self.group = runtime_context.GroupCoordinator(list(range(ranks)))
        told = runtime_context.CONTEXT
        sliced = context.pop("sliced", False)
        tp, ep = (ranks, 1) if sliced else (context.pop("moe_tp_size", 1), ranks)
        told.parallel = runtime_context.ParallelContext(
            moe_ep_size=context.pop("moe_ep_size", ep),
            moe_ep_rank=0 if sliced else rank,
            moe_tp_size=tp,
            moe_tp_rank=rank if sliced else 0,
            moe_ep_group=self.group,
            moe_tp_group=self.group,
        )
        told.schedule.chunked_prefill_size = PREFILL
        told.flags.moe.runner_backend = backend
        told.flags.moe.a2a_backend = context.pop("a2a_backend", "none")
        told.flags.moe.tbo_enabled = context.pop("tbo_enabled", False)
        told.exec.moe.enable_eplb = context.pop("enable_eplb", False)
        told.lora.enable_lora = context.pop("enable_lora", False)
        assert not context

    def layer(self, tensors: Tensors, **changes: Any) -> Any:
        from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

        cfg = tensors.cfg
        kind = {"swiglu": ("silu", True)}.get(cfg.activation, (cfg.activation, False))
        values = {"activation": kind[0], "is_gated": kind[1], "swiglu_limit": cfg.swiglu_limit}
        layer = FusedMoE(
            num_experts=cfg.experts,
            hidden_size=cfg.hidden,
            intermediate_size=cfg.intermediate,
            layer_id=0,
            top_k=cfg.top_k,
            params_dtype=cfg.dtype,
            **(values | changes),
        )
        load(layer, tensors)
        layer.quant_method.process_weights_after_loading(layer)
        return layer

    def forward(self, layer: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """As a model calls its experts; ranks add up what they return."""
        from sglang.srt.layers.moe.topk import StandardTopKOutput

        y: Tensor = layer.forward_impl(x, StandardTopKOutput(weights, ids, torch.empty(0)))
        return self.group.all_reduce(y) if self.ranks > 1 else y


def load(layer: Any, tensors: Tensors) -> None:
    """What SGLang's loaders do with a checkpoint."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    first = parallel.moe_ep_rank * layer.num_local_experts
    mine = slice(first, first + layer.num_local_experts)
    parts = {"w13_weight": tensors.w1, "w2_weight": tensors.w2}
    for name, (codes, scale) in tensors.codes.items():
        theirs = {"w1": "w13", "w2": "w2"}[name]
        end = "weight_scale_inv" if hasattr(layer, "w13_weight_scale_inv") else "weight_scale"
        parts |= {f"{theirs}_weight": codes, f"{theirs}_{end}": scale}
    for name, part in parts.items():
        parameter = getattr(layer, name)
        own = slice_of(tensors.cfg, name, part, parallel.moe_tp_rank, parallel.moe_tp_size)
        parameter.data.copy_(own[mine].view(parameter.shape))


def config(**changes: Any) -> MoEConfig:
    sizes: dict[str, Any] = {
        "hidden": HIDDEN,
        "intermediate": INTERMEDIATE,
        "experts": EXPERTS,
        "top_k": 2,
        "dtype": torch.float32,
    }
    return MoEConfig(**(sizes | changes))


@pytest.mark.parametrize(
    ("world", "dtype"),
    in_turn(
        [(1, False), (2, False), (4, False), (2, True), (3, True)], [torch.float32, torch.bfloat16]
    ),
    ids=str,
)
def test_ranks_with_equal_tokens_add_up_to_the_whole_result(
    world: tuple[int, bool], dtype: torch.dtype
) -> None:
    ranks, sliced = world

    def live(rank: int) -> list[float]:
        tensors = Tensors(config(dtype=dtype))
        server = Server(rank, ranks, sliced=sliced)
        layers = [server.layer(tensors) for _ in range(2)]
        core = layers[0].quant_method.runner.runner_core
        assert core._made.made.slicing.parallel == ("tensor" if sliced else "expert")
        errors = []
        # Fewer rows than ranks, none, and more than a chunk of a prefill.
        for turn, rows in enumerate((PREFILL, 1, 3, 7, 3 * PREFILL + 5, 0)):
            x, (ids, weights) = tensors.draw(rows, HIDDEN), tensors.routing(rows)
            y = server.forward(layers[turn % 2], x, ids, weights)
            errors.append(tensors.error(y, x, ids, weights))
        return errors

    assert all(error <= 1 for errors in on_ranks(live, ranks) for error in errors)


def test_a_fork_of_one_rank_computes_by_a_world_of_its_own_and_one_of_several_is_refused() -> None:
    def live(rank: int, ranks: int) -> list[float] | str:
        tensors = Tensors(config())
        server = Server(rank, ranks)
        layer = server.layer(tensors)
        x, (ids, weights) = tensors.draw(5, HIDDEN), tensors.routing(5)

        def call() -> float:
            return tensors.error(server.forward(layer, x, ids, weights), x, ids, weights)

        first = call()
        forked = in_fork(call)
        return str(forked) if ranks > 1 else [first, forked, call()]

    [errors] = on_ranks(lambda rank: live(rank, 1), 1)
    assert len(errors) == 3
    assert all(error <= 1 for error in errors)
    for rank, said in enumerate(on_ranks(lambda rank: live(rank, 2), 2)):
        assert said.startswith(f"the world of rank {rank} belongs to process")


@pytest.mark.parametrize(
    "changes",
    [{"activation": "silu"}, {"activation": "gelu_tanh"}, {"swiglu_limit": 0.5}, {"top_k": 8}],
    ids=str,
)
def test_layers_of_other_kinds_are_right(changes: dict[str, Any]) -> None:
    def live(rank: int) -> float:
        tensors = Tensors(config(**changes))
        server = Server(rank)
        x, (ids, weights) = tensors.draw(20, HIDDEN), tensors.routing(20)
        y = server.forward(server.layer(tensors), x, ids, weights)
        return tensors.error(y, x, ids, weights)

    assert on_ranks(live, 1)[0] <= 1


def test_a_scaling_factor_multiplies_the_sum_and_unused_slots_count_nothing() -> None:
    def live(rank: int) -> float:
        tensors = Tensors(config())
        server = Server(rank, 2)
        layer = server.layer(tensors, routed_scaling_factor=2.5)
        x, (ids, weights) = tensors.draw(9, HIDDEN), tensors.routing(9)
        unused = ids.clone()
        unused[3:6, 1] = -1
        y = server.forward(layer, x, unused, weights)
        used = weights * (unused >= 0)
        return tensors.error(y, x, ids, 2.5 * used)

    assert max(on_ranks(live, 2)) <= 1


def test_the_router_s_weight_multiplies_the_input_where_the_layer_says_so() -> None:
    def live(rank: int) -> float:
        tensors = Tensors(config(top_k=1))
        server = Server(rank, 2)
        layer = server.layer(tensors, apply_router_weight_on_input=True)
        x, (ids, _) = tensors.draw(9, HIDDEN), tensors.routing(9)
        weights = torch.rand(9, 1, generator=tensors.generator)
        y = server.forward(layer, x, ids, weights)
        return tensors.error(y, x * weights, ids, torch.ones(9, 1))

    assert max(on_ranks(live, 2)) <= 1


def test_another_backend_is_left_as_it_is() -> None:
    def live(rank: int) -> tuple[str, bool]:
        layer = Server(rank, 2, backend="triton").layer(Tensors(config()))
        return layer.runner_backend.value, layer.dispatcher.skip_local_expert_mapping

    assert on_ranks(live, 2) == [("triton", False)] * 2


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"moe_tp_size": 2, "moe_ep_size": 2},
        {},
        "moe_tp_size beside an --ep-size of .* is 2.*--ep-size equal to --tp-size .* --ep-size 1",
    ),
    ({"a2a_backend": "deepep"}, {}, "moe_a2a_backend is 'deepep'"),
    ({"enable_eplb": True}, {}, "enable_eplb is True"),
    ({"enable_lora": True}, {}, "enable_lora is True.*merge"),
    ({"tbo_enabled": True}, {}, "enable_two_batch_overlap is True"),
    ({}, {"num_fused_shared_experts": 1}, "num_fused_shared_experts is 1.*--disable-shared"),
    ({}, {"no_combine": True}, "no_combine is True"),
    ({}, {"with_bias": True}, "with_bias is True"),
    ({}, {"gemm1_alpha": 1.702}, "gemm1_alpha is 1.702"),
    ({}, {"gemm1_clamp_limit": 7.0}, "gemm1_clamp_limit is 7.0"),
    ({}, {"activation": "situ"}, "activation is 'situ'.*'silu'"),
    ({}, {"activation": "gelu"}, "activation is 'gelu'"),
    ({}, {"apply_router_weight_on_input": True}, "apply_router_weight_on_input with top_k is 2"),
]


@pytest.mark.parametrize(("told", "changes", "sentence"), REFUSED, ids=lambda v: str(v)[:40])
def test_what_cannot_be_done_is_refused_by_name_value_and_remedy(
    told: dict[str, Any], changes: dict[str, Any], sentence: str
) -> None:
    def live(rank: int) -> None:
        Server(rank, **told).layer(Tensors(config()), **changes)

    with pytest.raises(ValueError, match=sentence) as raised:
        on_ranks(live, 1)
    assert str(raised.value).isascii()
    assert str(raised.value).startswith("SGLang with --moe-runner-backend moeos: ")


def test_experts_that_ranks_cannot_cut_equally_are_refused() -> None:
    def live(rank: int) -> None:
        Server(rank, 2, sliced=True).layer(Tensors(config(intermediate=24)))

    match = r"moeos: intermediate is 24; 2 ranks .* a multiple of 16.*: --ep-size equal to --tp-siz"
    with pytest.raises(ValueError, match=match):
        on_ranks(live, 2)


@pytest.mark.parametrize(
    ("world", "block", "dtype"),
    covering(
        [(1, False), (2, False), (2, True)], [[128, 128], None], [torch.float32, torch.bfloat16]
    ),
    ids=str,
)
def test_experts_in_fp8_are_right_as_they_are_shipped(
    world: tuple[int, bool], block: list[int] | None, dtype: torch.dtype
) -> None:
    ranks, sliced = world
    weight_format = "fp8_tensor" if block is None else "fp8_block128"
    sizes = {"intermediate": 256} if sliced else {}  # a block for each rank

    def live(rank: int) -> list[float]:
        server = Server(rank, ranks, sliced=sliced)
        tensors = Tensors(config(dtype=dtype, weight_format=weight_format, **sizes))
        layer = server.layer(tensors, quant_method=fp8_method(weight_block_size=block))
        assert layer.runner_backend.value == "moeos"
        errors = []
        for rows in (PREFILL, 3):
            x, (ids, weights) = tensors.draw(rows, HIDDEN), tensors.routing(rows)
            errors.append(tensors.error(server.forward(layer, x, ids, weights), x, ids, weights))
        return errors

    assert all(error <= 1 for errors in on_ranks(live, ranks) for error in errors)


def _again(layer: Any) -> None:
    """Other parameters in the place of a layer's, and other memory in that of the others'."""
    for name, one in list(layer.named_parameters()):
        if name.startswith("w13"):
            layer.register_parameter(name, torch.nn.Parameter(one.data.clone(), False))
        else:
            one.data = one.data.clone()


@pytest.mark.parametrize("block", [None, [128, 128], False], ids=["tensor", "block", "numbers"])
def test_processing_and_calls_leave_parameters_alone_and_read_what_is_written(block: Any) -> None:
    changes = {} if block is False else {"weight_format": "fp8_block128" if block else "fp8_tensor"}

    def live(rank: int) -> tuple[bool, list[float]]:
        server = Server(rank)
        models = [Tensors(config(**changes), seed) for seed in range(3)]
        method = {} if block is False else {"quant_method": fp8_method(weight_block_size=block)}
        layer = server.layer(models[0], **method)

        def state() -> list[Any]:
            return [
                (
                    *(key, id(one), type(one), one.dtype, one.shape, one.stride(), one.data_ptr()),
                    *(sorted(vars(one)), one._version),
                    bytes(one.detach().view(torch.uint8).flatten().tolist()),
                )
                for key, one in layer.named_parameters()
            ]

        def call(model: Tensors) -> float:
            x, (ids, weights) = model.draw(5, HIDDEN), model.routing(5)
            return model.error(server.forward(layer, x, ids, weights), x, ids, weights)

        before = state()
        errors = [call(models[0])]
        layer.quant_method.process_weights_after_loading(layer)
        errors += [call(models[0]), call(models[0])]
        same = state() == before and not dict(layer.named_buffers())
        _again(layer)
        for model in models[1:]:
            load(layer, model)
            errors.append(call(model))
        return same, errors

    [(same, errors)] = on_ranks(live, 1)
    assert same
    assert max(errors) <= 1, errors


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("block", [[128, 128], None])
def test_another_name_of_the_backend_multiplies_fp8_by_fp8(
    block: list[int] | None, ranks: int
) -> None:
    coded = {
        "hidden": 128,
        "intermediate": 64,
        "weight_format": "fp8_tensor" if block is None else "fp8_block128",
        "activation_format": "fp8_group128",
    }

    def live(rank: int) -> list[float]:
        server = Server(rank, ranks, backend="moeos_fp8")
        tensors = Tensors(config(dtype=torch.bfloat16, **coded))
        in_numbers = Tensors(config(dtype=torch.bfloat16, **coded | {"activation_format": None}))
        layer = server.layer(tensors, quant_method=fp8_method(weight_block_size=block))
        assert layer.runner_backend.value == "moeos_fp8"
        assert layer.quant_method.runner.runner_core.runner_backend.value == "moeos_fp8"
        errors = []
        for rows in (PREFILL, 3):
            x, (ids, weights) = tensors.draw(rows, 128), tensors.routing(rows)
            y = server.forward(layer, x, ids, weights)
            assert in_numbers.error(y, x, ids, weights) > 2  # rounded they are
            errors.append(tensors.error(y, x, ids, weights))
        return errors

    assert all(error <= 1 for errors in on_ranks(live, ranks) for error in errors)


def test_that_name_refuses_experts_that_are_not_in_fp8() -> None:
    def live(rank: int) -> None:
        Server(rank, backend="moeos_fp8").layer(Tensors(config()))

    said = "moe-runner-backend moeos_fp8: weight_format is None.*--moe-runner-backend moeos has"
    with pytest.raises(ValueError, match=said):
        on_ranks(live, 1)


def fp8_method(**changes: Any) -> Any:
    from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod

    return Fp8MoEMethod(Fp8Config(**({"is_checkpoint_fp8_serialized": True} | changes)))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"activation_scheme": "static"}, "activation_scheme is 'static'.*input_scale is not used"),
        ({"weight_block_size": [1, 128]}, r"weight_block_size is \[1, 128\].*\[128, 128\]"),
        ({"is_checkpoint_fp8_serialized": False}, "is_checkpoint_fp8_serialized is False"),
        ({"use_mxfp8": True}, "use_mxfp8 is True"),
        ({"is_fp4_experts": True}, "is_fp4_experts is True.*experts in FP8 do"),
    ],
)
def test_fp8_of_another_kind_is_refused_by_its_field(
    changes: dict[str, Any], sentence: str
) -> None:
    def live(rank: int) -> None:
        server = Server(rank)
        server.layer(Tensors(config()), quant_method=fp8_method(**changes))

    with pytest.raises(ValueError, match=f"SGLang with --moe-runner-backend moeos: {sentence}"):
        on_ranks(live, 1)


@pytest.mark.parametrize("chosen", ["moeos", "deep_gemm"])
def test_a_layer_of_another_quantisation_is_refused_whichever_runner_it_takes(chosen: str) -> None:
    def live(rank: int) -> None:
        server = Server(rank)
        from sglang.srt.layers.moe.moe_runner import MoeRunner
        from sglang.srt.layers.moe.utils import resolve_moe_runner_backend
        from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

        class AWQMoEMethod(UnquantizedFusedMoEMethod):
            def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
                backend = resolve_moe_runner_backend(chosen)
                self.runner = MoeRunner(backend, moe_runner_config)

        server.layer(Tensors(config()), quant_method=AWQMoEMethod())

    with pytest.raises(
        ValueError, match=r"quant_method is 'AWQMoEMethod'.*FP8 checkpoint.*bfloat16"
    ):
        on_ranks(live, 1)


def test_the_lines_of_the_page_run_the_fp8_layer_of_any_server() -> None:
    page = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
    section = page.split("## In any other server\n")[1]
    code = section.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(compile(code, "docs/integrations.md", "exec"), names)
    tensors = Tensors(config(dtype=torch.bfloat16, intermediate=128, weight_format="fp8_block128"))
    (w13, scale_1), (w2, scale_2) = tensors.codes["w1"], tensors.codes["w2"]
    layer = types.SimpleNamespace(
        w13_weight=w13, w2_weight=w2, w13_weight_scale_inv=scale_1, w2_weight_scale_inv=scale_2
    )
    x, (ids, weights) = tensors.draw(9, HIDDEN), tensors.routing(9)
    with moeos.init() as world:
        call = names["quantised_experts"](layer, world, 2, PREFILL)
        assert tensors.error(call(x, ids, weights), x, ids, weights) <= 1


@pytest.mark.parametrize(
    ("weight_format", "shipped", "taken"),
    [
        # As the page's table has it: how servers have scales, and what is passed.
        ("fp8_tensor", lambda scale: scale.squeeze(1), lambda scale: scale.unsqueeze(1)),
        ("fp8_channel", lambda scale: scale.unsqueeze(2), lambda scale: scale.squeeze(2)),
        (
            "mxfp4",
            lambda scale: scale.view(torch.float8_e8m0fnu),
            lambda scale: scale.view(torch.uint8),
        ),
    ],
)
def test_the_scales_of_the_page_s_table_are_what_experts_take(
    weight_format: str, shipped: Any, taken: Any
) -> None:
    cfg = config(weight_format=weight_format, max_tokens=PREFILL, routing="caller")
    tensors = Tensors(cfg)
    (w1, scale_1), (w2, scale_2) = tensors.codes["w1"], tensors.codes["w2"]
    if weight_format == "mxfp4":
        w1, w2 = w1.view(torch.int8).view(torch.uint8), w2.view(torch.int8).view(torch.uint8)
    if weight_format != "fp8_tensor":  # where w13 has [X, 2]
        scale_1 = taken(shipped(scale_1))
    x, (ids, weights) = tensors.draw(9, HIDDEN), tensors.routing(9)
    with moeos.init() as world:
        experts = moeos.Experts(cfg, world)
        scales = {"w1_scale": scale_1, "w2_scale": taken(shipped(scale_2))}
        y = experts(x, ids, weights, w1, w2, **scales)
    assert tensors.error(y, x, ids, weights) <= 1
