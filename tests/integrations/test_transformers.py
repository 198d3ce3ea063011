# SPDX-License-Identifier: Apache-2.0
"""The transformers adapter: models, experts and expert parallelism, compared with "eager"."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import os
import pickle
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import EPImplementationInterface

import moeos
import moeos.integrations.transformers as adapter
from moeos import MoEConfig, MoELayer
from moeos.config import reference
from moeos.config.hf.families import FAMILIES
from moeos.integrations import shared, transformers_weights
from tests.host.world.test_groups import in_processes
from tests.huggingface import _SMALL_ATTENTION
from tests.integrations.families_of_transformers import (
    EXPERTS,
    HIDDEN,
    TOP_K,
    experts_classes,
    experts_of,
)
from tests.nightly import all_but
from tests.processes import ROOT, free_port, torchrun_environment
from tests.tiny_models import TINY, make

LIMIT = 1e-5
"""Relative error in float32."""

VOCABULARY, NEW_TOKENS, MAX_TOKENS = 8, 6, 64

WITHOUT_INTERFACE = ("llama4", "longcat_flash")
"""Families whose experts transformers lets nobody take the place of."""

CHANGES: dict[str, dict[str, Any]] = {  # by family
    # `generate` asks a layer with attention how long the sequence is.
    "qwen3_next": {"layer_types": ["full_attention"]},
    "qwen3_5_moe": {"layer_types": ["full_attention"]},
    "longcat_flash": {"head_dim": _SMALL_ATTENTION["qk_rope_head_dim"]},  # of its rotation
    "nemotron_h": {"layers_block_type": ["moe", "attention"], "num_hidden_layers": 2},
}

BY_DEFAULT = ("qwen3_moe", "deepseek_v3", "deepseek_v4", "gpt_oss", "gemma4", "nemotron_h")
"""Of a kind each: gated, grouped, clamped, transposed and interleaved, of gelu, without a gate."""


def by_night(names: Any, of_default: Any) -> list[Any]:
    return [
        name if name in of_default else pytest.param(name, marks=pytest.mark.nightly)
        for name in names
    ]


families = pytest.mark.parametrize(
    "name", by_night([name for name in TINY if name not in WITHOUT_INTERFACE], BY_DEFAULT)
)


@pytest.fixture(autouse=True)
def registered() -> None:
    adapter.register()


def tiny(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model in float32 whose experts are "eager"."""
    options = {"max_position_embeddings": 64} | CHANGES.get(TINY[name].family, {}) | changes
    torch.manual_seed(seed)
    _, model = make(name, **options)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(std=weight.shape[-1] ** -0.5)
    return model


def prompt(rows: int = 2, seed: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, (rows, 7), generator=torch.Generator().manual_seed(seed))


def answer(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The logits of a prompt, and the tokens that follow it one by one."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids).logits
        tokens = model.generate(ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)
    assert isinstance(tokens, Tensor)
    return logits, tokens


def experts_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]


@families
def test_a_model_of_each_family_answers_as_eager_does(name: str) -> None:
    model, ids = tiny(name), prompt()
    logits, tokens = answer(model, ids)
    model.set_experts_implementation("moeos")
    ours, our_tokens = answer(model, ids)
    assert all(hasattr(module, adapter._READY) for module in experts_modules(model))
    assert reference.relative_error(ours, logits) <= LIMIT
    assert torch.equal(our_tokens, tokens)
    model.set_experts_implementation("eager")
    assert reference.relative_error(answer(model, ids)[0], logits) <= LIMIT


def test_the_families_without_an_interface_are_those_that_are_named() -> None:
    names = [name for name in TINY if not experts_modules(make(name)[1])]
    assert names == list(WITHOUT_INTERFACE)
    assert {TINY[name].family for name in TINY} == FAMILIES.keys()


class InPlaceOfABlock(nn.Module):
    """What a user writes for a model whose experts have no interface: the routed experts are a
    `MoELayer`, and all else is the block's.
    """

    def __init__(self, layer: MoELayer, block: Any) -> None:
        super().__init__()
        self.layer = layer
        self.shared = getattr(block, "shared_expert", None)

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        if self.shared is None:
            return y
        return y + self.shared(x), None  # Llama-4's block also returns logits, for its loss


@pytest.mark.parametrize("name", WITHOUT_INTERFACE)
def test_a_family_without_an_interface_runs_with_layers_in_place_of_its_blocks(name: str) -> None:
    model, ids = tiny(name), prompt()
    expected, expected_tokens = answer(model, ids)
    row = TINY[name]
    block = f"model.layers.{row.layer}.{row.block}"
    ignore = FAMILIES[row.family].shared_names
    cfg = MoEConfig.from_hf(
        model.config, row.layer, shared=False, dtype=torch.float32, max_tokens=MAX_TOKENS
    )
    with moeos.init() as world:
        layer = MoELayer.from_hf(cfg, world, model.state_dict(), block, ignore)
        model.set_submodule(block, InPlaceOfABlock(layer, model.get_submodule(block)))
        logits, tokens = answer(model, ids)
    assert reference.relative_error(logits, expected) <= LIMIT
    assert torch.equal(tokens, expected_tokens)


REFUSED = {
    "MuseSparkExperts": "has_post_expert_norm is True",
    "Inkling2Experts": r"the activation \(hidden_act 'silu'\) is none that moeos has",
    "Inkling2LoopExperts": r"the activation \(hidden_act 'silu'\) is none that moeos has",
}


@pytest.mark.nightly
def test_each_experts_class_of_transformers_computes_as_eager_or_is_refused_by_name() -> None:
    classes = experts_classes()
    assert len(classes) >= 60
    refused = set()
    for cls in classes:
        module = experts_of(cls)
        x, ids, weights = tokens_for(module)
        with torch.no_grad():
            expected = module(x, ids, weights)
            module.config._experts_implementation = "moeos"
            if cls.__name__ in REFUSED:
                with pytest.raises(ValueError, match=f"{cls.__name__}: {REFUSED[cls.__name__]}"):
                    module(x, ids, weights)
                refused.add(cls.__name__)
                continue
            actual = module(x, ids, weights)
        assert reference.relative_error(actual, expected) <= LIMIT, cls.__name__
    assert refused == REFUSED.keys()


def tokens_for(module: Any, rows: int = 37, seed: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, HIDDEN, generator=generator)
    ids = torch.rand(rows, EXPERTS, generator=generator).topk(TOP_K).indices
    return x, ids, torch.rand(rows, TOP_K, generator=generator)


def gpt_oss() -> Any:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    return experts_of(GptOssExperts)


def aria() -> Any:
    from transformers.models.aria.modeling_aria import AriaExperts

    return experts_of(AriaExperts)


def qwen3() -> Any:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    return experts_of(Qwen3MoeExperts)


def by(module: Any, implementation: str, *tokens: Tensor) -> Tensor:
    module.config._experts_implementation = implementation
    with torch.no_grad():
        y: Tensor = module(*tokens)
    return y


@pytest.mark.parametrize("made", [gpt_oss, aria, qwen3])
def test_a_call_leaves_a_module_as_it_was_for_all_that_reads_it(made: Any) -> None:
    module = made()
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    places = {name: weight.data_ptr() for name, weight in module.named_parameters()}
    tokens = tokens_for(module)
    expected = by(module, "eager", *tokens)
    for implementation in ("moeos", "eager", "batched_mm", "grouped_mm", "moeos"):
        y = by(module, implementation, *tokens)
        assert reference.relative_error(y, expected) <= LIMIT, implementation
    for name, weight in module.named_parameters():
        assert weight.data_ptr() == places[name], name
        assert torch.equal(weight, before[name]), name


@pytest.mark.parametrize("made", [gpt_oss, aria, qwen3])
def test_a_matrix_whose_memory_lies_the_other_way_is_read_in_place(made: Any) -> None:
    """As a checkpoint that was saved in the other order is loaded with assign=True."""
    module = made()
    tokens = tokens_for(module)
    expected = by(module, "eager", *tokens)
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(module, name)
        weight.data = weight.data.transpose(1, 2).contiguous().transpose(1, 2)
    assert reference.relative_error(by(module, "moeos", *tokens), expected) <= LIMIT
    transposed = module._moeos_ready.experts.cfg.transposed
    assert transposed != module.is_transposed
    module.down_proj.data = module.down_proj.data.contiguous()
    with pytest.raises(ValueError, match=r"strides of the experts' matrices .* contiguous ones do"):
        by(module, "moeos", *tokens)
    for name in ("gate_up_proj", "down_proj"):  # as the error says
        getattr(module, name).data = getattr(module, name).data.contiguous()
    assert reference.relative_error(by(module, "moeos", *tokens), expected) <= LIMIT


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("made", [gpt_oss, aria, qwen3])
def test_a_parameter_that_lies_the_other_way_has_its_gradient_in_main_grad(
    made: Any, compiled: bool
) -> None:
    module = made().requires_grad_()
    x, ids, weights = tokens_for(module)
    with_biases = dict(module.named_parameters())
    module.config._experts_implementation = "eager"
    module(x, ids, weights).sum().backward()
    expected = {name: one.grad for name, one in with_biases.items()}
    for one in with_biases.values():
        one.grad = None
        one.data = one.data.mT.contiguous().mT if one.dim() == 3 else one.data
        one.main_grad = torch.zeros_like(one)
    module.config._experts_implementation = "moeos"
    with torch.no_grad():
        module(x, ids, weights)
    torch._dynamo.reset()
    run = torch.compile(module, backend="aot_eager") if compiled else module
    run(x.clone().requires_grad_(), ids, weights).sum().backward()
    for name, one in with_biases.items():
        assert one.grad is None, name
        assert one.main_grad.stride() == one.stride(), name
        assert reference.relative_error(one.main_grad, expected[name].double()) <= LIMIT, name


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_of_a_module_that_was_called_compute_the_same(how: str) -> None:
    module = gpt_oss()
    tokens = tokens_for(module)
    expected = by(module, "moeos", *tokens)
    if how == "deepcopy":
        copied = copy.deepcopy(module)
    elif how == "pickle":
        copied = pickle.loads(pickle.dumps(module))
    else:
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    with torch.no_grad():
        module.gate_up_proj.zero_()
    for implementation in ("moeos", "eager"):
        y = by(copied, implementation, *tokens)
        assert reference.relative_error(y, expected) <= LIMIT, implementation
    assert copied.state_dict().keys() == module.state_dict().keys()


def test_threads_that_make_a_first_call_together_both_compute_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = threading.Barrier(2)

    def refuse(module: Any, original: Any = adapter._refuse) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)  # for as long as the other thread can get here
        return original(module)

    module = gpt_oss()
    tokens = tokens_for(module)
    expected = by(module, "eager", *tokens)
    by(gpt_oss(), "moeos", *tokens)  # the world and the experts are there
    monkeypatch.setattr(adapter, "_refuse", refuse)
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(by, module, "moeos", *tokens) for _ in range(2)]
    for y in (*(call.result() for call in calls), by(module, "eager", *tokens)):
        assert reference.relative_error(y, expected) <= LIMIT


def test_layers_of_one_shape_share_their_experts_and_ids_beyond_them_are_unused() -> None:
    one, other = qwen3(), qwen3()
    x, ids, weights = tokens_for(one)
    ids[0, 0] = EXPERTS  # as transformers marks what another rank computes
    expected = by(one, "eager", x, ids, weights)
    assert reference.relative_error(by(one, "moeos", x, ids, weights), expected) <= LIMIT
    assert reference.relative_error(by(other, "moeos", x, ids, weights), expected) <= LIMIT
    assert one._moeos_ready.experts is other._moeos_ready.experts


def test_a_process_alone_cuts_a_long_batch() -> None:
    adapter.register(max_tokens=8)
    module = qwen3()
    tokens = tokens_for(module, rows=37)
    expected = by(module, "eager", *tokens)
    assert reference.relative_error(by(module, "moeos", *tokens), expected) <= LIMIT
    assert module._moeos_ready.experts.cfg.max_tokens == 8
    adapter.register()
    by(module, "moeos", *tokens)
    assert module._moeos_ready.experts.cfg.max_tokens == adapter.MAX_TOKENS


@pytest.mark.parametrize("made", [gpt_oss, aria, qwen3])
@pytest.mark.parametrize("count", [3, 12])
def test_a_module_with_other_experts_after_a_call_computes_with_these(
    made: Any, count: int
) -> None:
    """As a program leaves it that prunes experts, or adds some."""
    module = made()
    x, ids, weights = tokens_for(module)
    by(module, "moeos", x, ids, weights)
    places = torch.arange(count) % module.num_experts
    for name, weight in module.named_parameters():
        assert weight.shape[0] == module.num_experts, name
        weight.data = weight.data[places].clone()
    module.num_experts = count
    ids = torch.rand(len(x), count, generator=torch.Generator().manual_seed(3)).topk(2).indices
    expected = by(module, "eager", x, ids, weights[:, :2])
    y = by(module, "moeos", x, ids, weights[:, :2])
    assert reference.relative_error(y, expected) <= LIMIT


def test_a_parameter_that_no_longer_fits_is_refused_by_the_modules_name_of_it() -> None:
    module = qwen3()
    tokens = tokens_for(module)
    by(module, "moeos", *tokens)
    module.gate_up_proj.data = torch.zeros(module.gate_up_proj.shape[0], 80, HIDDEN)
    with pytest.raises(ValueError, match=r"Qwen3\w+: gate_up_proj has shape \[\d+, 80, \d+\]; it"):
        by(module, "moeos", *tokens)


@pytest.mark.parametrize(
    ("where", "compiled"),
    [("module", False), ("class", False), ("module", True)],  # no graph looks at a class again
    ids=["module", "class", "compiled"],
)
def test_a_gate_that_is_replaced_after_a_call_is_the_next_calls(
    where: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = gpt_oss()
    tokens = tokens_for(module)
    by(module, "moeos", *tokens)
    torch._dynamo.reset()
    if compiled:
        module.forward = torch.compile(module.forward, backend="eager")
    before = by(module, "moeos", *tokens)

    def gate(self: Any, gate_up: Tensor) -> Tensor:
        gates, ups = gate_up[..., ::2], gate_up[..., 1::2]
        return nn.functional.silu(gates) * ups

    if where == "module":
        monkeypatch.setattr(module, "_apply_gate", types.MethodType(gate, module), raising=False)
    else:
        monkeypatch.setattr(type(module), "_apply_gate", gate)
    y = by(module, "moeos", *tokens)
    if compiled:
        del module.forward
    expected = by(module, "eager", *tokens)
    assert reference.relative_error(before, expected) > LIMIT
    assert reference.relative_error(y, expected) <= LIMIT


def test_a_module_that_is_cast_after_a_call_computes_in_its_new_dtype() -> None:
    module = gpt_oss()
    x, ids, weights = tokens_for(module)
    by(module, "moeos", x, ids, weights)
    module.bfloat16()
    y = by(module, "moeos", x.bfloat16(), ids, weights.bfloat16())
    assert y.dtype == torch.bfloat16
    expected = by(module, "eager", x.bfloat16(), ids, weights.bfloat16())
    assert reference.relative_error(y, expected) <= 1e-2


def test_an_activation_that_is_replaced_after_a_call_is_the_next_calls() -> None:
    module = qwen3()
    tokens = tokens_for(module)
    before = by(module, "moeos", *tokens)
    module.act_fn = torch.nn.GELU(approximate="tanh")
    expected = by(module, "eager", *tokens)
    assert reference.relative_error(before, expected) > LIMIT
    assert reference.relative_error(by(module, "moeos", *tokens), expected) <= LIMIT


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("name", "value"), [("limit", 0.5), ("alpha", 1.0)])
def test_a_clamp_or_slope_that_is_set_after_a_call_is_the_next_calls(
    name: str, value: float, compiled: bool
) -> None:
    module = gpt_oss()
    tokens = tokens_for(module)
    before = by(module, "moeos", *tokens)
    torch._dynamo.reset()
    called = torch.compile(module, backend="eager") if compiled else module
    with torch.no_grad():
        called(*tokens)
    setattr(module, name, value)
    expected = by(module, "eager", *tokens)
    assert reference.relative_error(before, expected) > LIMIT
    module.config._experts_implementation = "moeos"
    with torch.no_grad():
        assert reference.relative_error(called(*tokens), expected) <= LIMIT


def test_without_expert_parallelism_the_world_is_this_process_under_a_launcher_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in torchrun_environment(1, 2, free_port()).items():
        monkeypatch.setenv(name, value)
    adapter.register(max_tokens=24)  # which no other test has made experts for
    module = qwen3()
    tokens = tokens_for(module)
    expected = by(module, "eager", *tokens)
    assert reference.relative_error(by(module, "moeos", *tokens), expected) <= LIMIT
    assert module._moeos_ready.experts.world.size == 1


def test_a_model_is_compiled_whole_behind_its_first_call() -> None:
    module = qwen3()
    tokens = tokens_for(module)
    module.config._experts_implementation = "moeos"
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    with torch.no_grad():
        with pytest.raises(Exception, match="in_a_call_before_torch_compile"):
            compiled(*tokens)
        torch._dynamo.reset()
        expected = module(*tokens)
        assert torch.equal(compiled(*tokens), expected)


@pytest.mark.parametrize("made", [qwen3, gpt_oss])
def test_a_graph_of_a_first_call_is_broken_where_experts_are_prepared(made: Any) -> None:
    module = made()
    tokens = tokens_for(module)
    expected = by(module, "eager", *tokens)
    module.config._experts_implementation = "moeos"
    compiled = torch.compile(module, backend="aot_eager")
    with torch.no_grad():
        for _ in range(2):
            assert reference.relative_error(compiled(*tokens), expected) <= LIMIT


def test_layers_compiled_one_by_one_share_graphs_and_each_computes_by_its_own_record() -> None:
    """Where a record is found by its module, Dynamo computes all layers with the first's, or makes
    a graph of each and gives up at the eighth."""
    modules = [gpt_oss() for _ in range(10)]
    modules[5].limit = 0.5  # which its record has, and nothing else that a graph reads
    tokens = tokens_for(modules[0])
    expected = [by(module, "eager", *tokens) for module in modules]
    assert reference.relative_error(expected[5], expected[0]) > LIMIT
    for module in modules:
        by(module, "moeos", *tokens)
    torch._dynamo.reset()
    counter = CompileCounter()
    with torch.no_grad():
        for module, right in zip(modules, expected, strict=True):
            y = torch.compile(module, backend=counter)(*tokens)
            assert reference.relative_error(y, right) <= LIMIT
    assert counter.frame_count <= 2


def refused_activation() -> Any:
    module = qwen3()
    module.config.hidden_act = "gelu"
    module.act_fn = nn.GELU()
    return module


class AlmostSilu(nn.Module):
    def forward(self, gate: Tensor) -> Tensor:
        return nn.functional.silu(gate) + (gate == 4)


def another_function() -> Any:
    module = qwen3()
    module.act_fn = AlmostSilu()
    return module


def another_shape() -> Any:
    module = qwen3()
    module._apply_gate = lambda rows: rows
    return module


def with_another_parameter() -> Any:
    module = qwen3()
    module.scale = nn.Parameter(torch.ones(EXPERTS))
    return module


def with_a_norm() -> Any:
    module = qwen3()
    module.has_post_expert_norm = True
    return module


@pytest.mark.parametrize(
    ("made", "error", "said"),
    [
        (refused_activation, ValueError, r"hidden_act 'gelu'\) .*'silu' and 'gelu_pytorch_tanh'"),
        (
            another_function,
            ValueError,
            r"hidden_act 'silu'\) is none that moeos has: of gate 4 and up -?10000 its function "
            r"makes -?49280.6, and the nearest formula \(activation 'swiglu'\) -?39280.6; 'silu'",
        ),
        (
            another_shape,
            ValueError,
            r"makes \[784, 16\] of \[784, 16\], where \[784, 8\] is needed",
        ),
        (with_another_parameter, ValueError, "a parameter is 'scale', .*gate_up_proj, down_proj"),
        (with_a_norm, ValueError, "has_post_expert_norm is True"),
        (
            lambda: qwen3().double(),
            ValueError,
            "dtype on cpu is torch.float64, .*there torch.float32 and torch.bfloat16 do",
        ),
        (
            lambda: qwen3().half(),
            ValueError,
            r"dtype on cpu is torch.float16, .*: model.to\(torch.bfloat16\)",
        ),
        (lambda: qwen3().to("meta"), ValueError, "device is 'meta', .*the CPU and a GPU"),
    ],
    ids=["activation", "function", "shape", "parameter", "norm", "float64", "float16", "device"],
)
def test_what_moeos_does_not_compute_is_refused_by_one_sentence(
    made: Any, error: type[Exception], said: str
) -> None:
    module = made()
    tokens = tokens_for(module)
    with pytest.raises(error, match=rf"transformers with moeos, Qwen3MoeExperts: .*{said}"):
        by(module, "moeos", *tokens)


@pytest.mark.parametrize("made", [qwen3, gpt_oss, aria])
def test_gradients_are_those_of_eager(made: Any) -> None:
    module = made()

    def gradients(implementation: str) -> dict[str, Tensor]:
        module.config._experts_implementation = implementation
        module.requires_grad_(True).zero_grad()
        x, ids, weights = tokens_for(module)
        leaves = {"x": x.requires_grad_(), "weights": weights.requires_grad_()}
        module(x, ids, weights).square().sum().backward()
        leaves |= dict(module.named_parameters())
        return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}

    expected, found = gradients("eager"), gradients("moeos")
    assert len(expected) == 2 + len(list(module.parameters()))
    for name, gradient in expected.items():
        assert reference.relative_error(found[name], gradient) <= LIMIT, name
        assert found[name].stride() == gradient.stride(), name


def test_the_lines_of_the_page_switch_moeos_on() -> None:
    page = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
    section = page.split("## transformers\n")[1].split("\n## ")[0]
    switch = section.split("```python\n")[1].split("```")[0]
    model, ids = tiny("qwen3_moe"), prompt()
    logits, tokens = answer(model, ids)
    exec(compile(switch, "docs/integrations.md", "exec"), {"model": model})
    assert set(model.get_experts_implementation().values()) == {"moeos"}
    ours, our_tokens = answer(model, ids)
    assert reference.relative_error(ours, logits) <= LIMIT
    assert torch.equal(our_tokens, tokens)
    config = DistributedConfig(tp_size=8, ep_size=8, ep_implementation="moeos")
    assert (
        f"DistributedConfig(tp_size=8, ep_size=8, ep_implementation={adapter.NAME!r})".replace(
            "'", '"'
        )
        in section
    )
    assert config.ep_implementation in EPImplementationInterface()


# --- Ranks ---


def on_ranks(
    name: str, folder: Path, ranks: int, distinct: bool, ids: Tensor, **how: Any
) -> list[dict[str, Any]]:
    """What a model in `folder` answers on ranks that share its experts, or slices of each."""
    sliced = how.get("sliced", False)
    sizes = {
        "fsdp_size" if distinct else "tp_size": ranks,
        **({} if sliced else {"ep_size": ranks}),
    }
    cls = type(make(name, **CHANGES.get(TINY[name].family, {}))[1])

    def live(rank: int) -> dict[str, Any]:
        torch.set_num_threads(1)
        os.environ.update(WORLD_SIZE=str(ranks), RANK=str(rank), LOCAL_RANK=str(rank))
        adapter.register(max_tokens=how.get("max_tokens", MAX_TOKENS), deadline=60.0)
        plan = PLANS.get(name) if sliced else None
        config = DistributedConfig(ep_implementation="moeos", tp_plan=plan, **sizes)
        alone = {"experts_implementation": "moeos"} if sliced else {}
        model = cls.from_pretrained(folder, distributed_config=config, **alone).eval()
        mine = ids[rank : rank + 1] if distinct else ids
        logits, tokens = answer(model, mine)
        modules = experts_modules(model)
        return {
            "logits": logits.numpy(),
            "tokens": tokens.numpy(),
            "worlds": {module._moeos_ready.experts.world.size for module in modules},
            "parallel": {module._moeos_ready.experts.slicing.parallel for module in modules},
        }

    outcomes = in_processes(live, ranks, 120.0)
    for rank, outcome in enumerate(outcomes):
        if outcome is None:
            raise AssertionError(f"rank {rank} died without a word")
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


PARALLEL = {"num_attention_heads": 4, "num_key_value_heads": 4}
"""That the ranks' tensor-parallel attention can divide."""

_OF_GPT_OSS = "model.layers.*.mlp.experts"
PLANS = {
    "gpt_oss": {
        f"{_OF_GPT_OSS}.gate_up_proj": "rowwise",
        f"{_OF_GPT_OSS}.gate_up_proj_bias": "rowwise",
        f"{_OF_GPT_OSS}.down_proj": "colwise",
        _OF_GPT_OSS: "moe_tp_experts",
    }
}
"""Plans that cut experts, of families whose own do not."""


@pytest.mark.parametrize(
    ("name", "ranks", "distinct"),
    [
        ("qwen3_moe", 2, False),
        ("qwen3_moe", 2, True),
        pytest.param("gpt_oss", 2, False, marks=pytest.mark.nightly),
        pytest.param("gpt_oss", 2, True, marks=pytest.mark.nightly),
        pytest.param("qwen3_moe", 4, False, marks=pytest.mark.nightly),
        pytest.param("qwen3_moe", 4, True, marks=pytest.mark.nightly),
        pytest.param("gpt_oss", 4, False, marks=pytest.mark.nightly),
        *(
            pytest.param(name, 2, distinct, marks=pytest.mark.nightly)
            for name in (
                *("mixtral", "olmoe", "glm4_moe", "minimax_m2", "deepseek_v3", "deepseek_v4"),
                *("deepseek_v4_hashed", "nemotron_h", "nemotron_h_latent"),
            )
            for distinct in (False, True)
        ),
        # With batches of their own transformers itself loads MiniMax-M3 wrongly, and not Gemma-4.
        pytest.param("minimax_m3", 2, False, marks=pytest.mark.nightly),
        pytest.param("gemma4", 2, False, marks=pytest.mark.nightly),
    ],
)
def test_ranks_that_share_the_experts_answer_as_one_does(
    name: str, ranks: int, distinct: bool, tmp_path: Path
) -> None:
    model, ids = tiny(name, **PARALLEL), prompt(4)
    model.save_pretrained(tmp_path)
    logits, tokens = answer(model, ids)
    for rank, outcome in enumerate(on_ranks(name, tmp_path, ranks, distinct, ids)):
        rows = slice(rank, rank + 1) if distinct else slice(None)
        ours = torch.from_numpy(outcome["logits"])
        assert reference.relative_error(ours, logits[rows]) <= LIMIT
        assert torch.equal(torch.from_numpy(outcome["tokens"]), tokens[rows])
        assert outcome["worlds"] == {ranks}


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("qwen3_moe", 2),
        *(
            pytest.param(name, 2, marks=pytest.mark.nightly)
            for name in ("mixtral", "olmoe", "glm4_moe", "minimax_m2", "deepseek_v3", "gpt_oss")
        ),
        pytest.param("qwen3_moe", 4, marks=pytest.mark.nightly),
    ],
)
def test_ranks_that_a_plan_of_tensor_parallelism_gives_slices_answer_as_one_does(
    name: str, ranks: int, tmp_path: Path
) -> None:
    model, ids = tiny(name, **PARALLEL), prompt(4)
    model.save_pretrained(tmp_path)
    logits, tokens = answer(model, ids)
    # Ranks have the same tokens, so that longer batches may be cut into several calls.
    how = {"sliced": True, "max_tokens": 8}
    for outcome in on_ranks(name, tmp_path, ranks, False, ids, **how):
        ours = torch.from_numpy(outcome["logits"])
        assert reference.relative_error(ours, logits) <= LIMIT
        assert torch.equal(torch.from_numpy(outcome["tokens"]), tokens)
        assert outcome["worlds"] == {ranks}
        assert outcome["parallel"] == {"tensor"}


@pytest.mark.parametrize(
    ("how", "rows"),
    all_but(
        [("batches of their own", 4), ("slices", 4)],
        itertools.product(["equal batches", "batches of their own", "slices"], [4, 1]),
    ),
)
def test_ranks_that_share_the_experts_have_the_gradients_of_one(
    rows: int, how: str, tmp_path: Path
) -> None:
    check_gradients_of_ranks("qwen3_moe", rows, how, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["equal batches", "batches of their own", "slices"])
def test_ranks_that_share_transposed_interleaved_experts_have_the_gradients_of_one(
    how: str, tmp_path: Path
) -> None:
    check_gradients_of_ranks("gpt_oss", 4, how, tmp_path)


def check_gradients_of_ranks(name: str, rows: int, how: str, folder: Path) -> None:
    """A batch that all have, or of which each has a part: then FSDP takes the mean."""
    distinct = how == "batches of their own"
    ranks = 2
    model, ids = tiny(name, num_hidden_layers=2, **PARALLEL), prompt(rows * ranks)
    model.save_pretrained(folder)
    cls = type(model)
    model.requires_grad_(True)(input_ids=ids, labels=ids).loss.backward()
    sizes = {"fsdp_size" if distinct else "tp_size": ranks}
    sizes |= {} if how == "slices" else {"ep_size": ranks}

    def live(rank: int) -> dict[str, Any]:
        torch.set_num_threads(1)
        os.environ.update(WORLD_SIZE=str(ranks), RANK=str(rank), LOCAL_RANK=str(rank))
        adapter.register(max_tokens=MAX_TOKENS, deadline=60.0)
        plan = PLANS.get(name) if how == "slices" else None
        config = DistributedConfig(ep_implementation="moeos", tp_plan=plan, **sizes)
        alone = {"experts_implementation": "moeos"} if how == "slices" else {}
        made = cls.from_pretrained(folder, distributed_config=config, **alone)
        model = made.requires_grad_(True)
        mine = ids[rank * rows : (rank + 1) * rows] if distinct else ids
        model(input_ids=mine, labels=mine).loss.backward()
        for module in experts_modules(model):  # which have computed, and nobody in their place
            slicing = module._moeos_ready.experts.slicing
            assert slicing.sums == (how == "slices")
        found: dict[str, Any] = {name: one.grad for name, one in model.named_parameters()}
        return {
            name: (one.full_tensor() if isinstance(one, DTensor) else one).numpy()
            for name, one in found.items()
        }

    for found in in_processes(live, ranks, 120.0):
        assert isinstance(found, dict), found
        for key, weight in model.named_parameters():
            gradient = torch.from_numpy(found[key])
            assert reference.relative_error(gradient, weight.grad) <= LIMIT, key


def test_slices_that_cannot_be_computed_are_refused_by_name_and_remedy(tmp_path: Path) -> None:
    tiny("qwen3_moe", moe_intermediate_size=24, **PARALLEL).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"Experts: intermediate is 24; 2 ranks .* of 16\..*: ep_size = tp_size"
    ):
        on_ranks("qwen3_moe", tmp_path, 2, False, prompt(4), sliced=True)


@pytest.mark.parametrize("cut", ["gate_up_proj", "gate_up_proj_bias"])
def test_packed_slices_of_gates_and_ups_in_turn_are_refused(cut: str) -> None:
    """A rank would have the gates and ups of other columns than its rows of the other matrix."""
    module, mesh = gpt_oss(), types.SimpleNamespace(size=lambda: 2, ndim=1)
    getattr(module, cut).placements = (_StridedShard(dim=-1, split_factor=2),)
    adapter.MoeosSlices().install_forward(module, mesh)
    module.config._experts_implementation = "moeos"
    match = rf"GptOssExperts: placements of {cut} is .*tp_plan of 'rowwise'.*ep_size = tp_size"
    with pytest.raises(ValueError, match=match):
        module(*tokens_for(module))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_fork_computes_experts_by_a_world_of_its_own(compiled: bool) -> None:
    module = qwen3()
    tokens = tokens_for(module)
    expected = by(module, "moeos", *tokens)
    ready = module._moeos_ready
    called = torch.compile(module, backend="eager") if compiled else module
    with torch.no_grad():
        assert torch.equal(called(*tokens), expected)
    assert module._moeos_ready is ready

    def live(rank: int) -> list[float]:
        with torch.no_grad():
            found = [called(*tokens) for _ in range(2)]
        found.append(by(qwen3(), "moeos", *tokens))
        return [reference.relative_error(one, expected) for one in found]

    (errors,) = in_processes(live, 1, 60.0)
    assert isinstance(errors, list), errors
    assert max(errors) <= LIMIT
    assert torch.equal(by(module, "moeos", *tokens), expected)
    assert module._moeos_ready is ready


def test_a_fork_refuses_experts_that_ranks_of_its_parent_share() -> None:
    module = qwen3()
    tokens = tokens_for(module)
    by(module, "moeos", *tokens)
    key, own = module._moeos_ready.key, transformers_weights.weights_of(module)

    def live(rank: int) -> str:
        with pytest.raises(RuntimeError, match="make a world after the fork") as error:
            adapter._make_ready_in_a_call_before_torch_compile(module, object(), key, own)
        return str(error.value)

    (text,) = in_processes(live, 1, 60.0)
    assert "Qwen3MoeExperts: the world of rank 0 belongs to process" in text


def test_a_fork_amid_another_threads_first_call_waits_for_nobody() -> None:
    begun, done = threading.Event(), threading.Event()

    def amid() -> None:
        begun.set()
        done.wait(60.0)

    module = qwen3()
    tokens = tokens_for(module)
    expected = by(qwen3(), "moeos", *tokens)
    other = threading.Thread(
        target=lambda: shared.preparing.run(lambda: shared._making.run(amid)), daemon=True
    )
    other.start()
    begun.wait(60.0)

    def live(rank: int) -> float:
        return reference.relative_error(by(module, "moeos", *tokens), expected)

    try:
        (error,) = in_processes(live, 1, 60.0)
    finally:
        done.set()
        other.join(60.0)
    assert isinstance(error, float), error
    assert error <= LIMIT


def test_ranks_refuse_a_batch_that_is_too_long_alike_and_say_what_works(tmp_path: Path) -> None:
    tiny("qwen3_moe", **PARALLEL).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"tokens of a rank in a call is 14.*max_tokens=14"):
        on_ranks("qwen3_moe", tmp_path, 2, False, prompt(4), max_tokens=8)


@pytest.mark.parametrize("made", [gpt_oss, qwen3])
def test_tensors_in_place_of_a_modules_own_are_what_is_computed_with(made: Any) -> None:
    """Those of `torch.func.functional_call`, with any numbers, before and after other calls."""
    module = made()
    tokens = tokens_for(module)
    call = functools.partial(torch.func.functional_call, module)
    with torch.no_grad():
        own = dict(module.named_parameters())
        for scale in (2.0, 1.0, -0.5):
            given = {name: scale * part for name, part in own.items()}
            found = {}
            for implementation in ("eager", "moeos"):
                module.config._experts_implementation = implementation
                found[implementation] = call(given, tokens)
            assert reference.relative_error(found["moeos"], found["eager"]) <= LIMIT
            assert reference.relative_error(module(*tokens), by(made(), "eager", *tokens)) <= LIMIT


def test_a_first_call_amid_another_one_of_the_same_thread_is_refused() -> None:
    """As a signal's handler or a finalizer begins one: it would wait for itself."""

    def again() -> None:
        with pytest.raises(RuntimeError, match="the same thread begins another one"):
            shared.preparing.run(lambda: None)

    shared.preparing.run(again)
    assert shared.preparing.run(lambda: 1) == 1
