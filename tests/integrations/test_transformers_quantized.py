# SPDX-License-Identifier: Apache-2.0
"""The transformers adapter with experts in FP8 and FP4: they compute what transformers' own module
computes with the numbers that it makes of them.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssForCausalLM, PreTrainedModel, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig
from transformers.integrations import finegrained_fp8
from transformers.integrations.moe import use_experts_implementation
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

import moeos.integrations.transformers as adapter
from moeos.config import reference
from moeos.config.element_formats import quantize_matrix
from moeos.integrations import (
    transformers_mxfp4,
    transformers_quantized,
    transformers_weights,
)
from tests.host.world.test_groups import in_processes
from tests.integrations.test_transformers import PARALLEL, answer, experts_modules, prompt, tiny

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 256, 128, 8, 2
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
"""Relative error."""

FILE = "model.safetensors"

NO_CONVERSION = ["model.layers.0.self_attn", "lm_head"]
"""What stays in numbers: transformers' other FP8 layers need a GPU."""


@pytest.fixture(autouse=True)
def registered() -> None:
    adapter.register()


@contextlib.contextmanager
def fp8_on_a_cpu() -> Iterator[None]:
    """transformers keeps FP8 as it is, where it would make numbers of it for want of a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
        yield


def fp8_experts(
    weight_format: str = "fp8_block128",
    scale_fmt: str = "float",
    gated: bool = True,
    **changes: Any,
) -> Any:
    """A module as transformers' quantiser makes it, with random codes."""
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": INTERMEDIATE, "num_experts": EXPERTS}
    config = types.SimpleNamespace(
        **(sizes | {"hidden_act": "silu" if gated else "relu2"} | changes),
        _experts_implementation="moeos",
    )
    # The decorator changes the class that it is given.
    own = type("FP8Experts", (finegrained_fp8.FP8Experts,), {})
    cls = use_experts_implementation(
        experts_class=own,
        experts_interface=finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS,
        has_gate=gated,
    )
    module: Any = cls(
        config,
        block_size=None if weight_format == "fp8_tensor" else [128, 128],
        scale_fmt=scale_fmt,
        has_gate=gated,
        expert_dtype="fp4" if weight_format == "mxfp4" else "fp8",
    )
    generator = torch.Generator().manual_seed(0)
    for name in ("gate_up_proj" if gated else "up_proj", "down_proj"):
        codes, scale = getattr(module, name), getattr(module, f"{name}_scale_inv")
        columns = codes.shape[2] * (2 if weight_format == "mxfp4" else 1)
        numbers = torch.randn(*codes.shape[:2], columns, generator=generator) / columns**0.5
        halves = 2 if name == "gate_up_proj" else 1
        made, made_scale, _ = quantize_matrix(numbers, weight_format, halves)
        codes.data = made.view(codes.dtype)
        if weight_format == "mxfp4":
            made_scale = made_scale.view(torch.float8_e8m0fnu)
        elif weight_format == "fp8_tensor":
            made_scale = made_scale.unsqueeze(-1)
        scale.data = made_scale.to(scale.dtype)
    return module


def in_numbers(module: Any, dtype: torch.dtype) -> Any:
    """The same module with what transformers itself makes of its codes."""
    made = copy.deepcopy(module)
    dequantise = finegrained_fp8.Fp8Dequantize(None)._dequantize_one
    for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
        codes, scale = getattr(module, name).data, getattr(module, f"{name}_scale_inv").data
        numbers = [dequantise(*pair, dtype) for pair in zip(codes, scale, strict=True)]
        getattr(made, name).data = torch.stack(numbers)
    made.config = copy.copy(module.config)
    made.config._experts_implementation = "eager"
    return made


def tokens_for(rows: int = 37, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(rows, HIDDEN, generator=generator).to(dtype)
    ids = torch.rand(rows, EXPERTS, generator=generator).topk(TOP_K).indices
    return x, ids, torch.rand(rows, TOP_K, generator=generator)


def expected(module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    with torch.no_grad():
        y: Tensor = in_numbers(module, torch.float64)(x.double(), ids, weights.double())
    return y


def called(module: Any, *tokens: Tensor) -> Tensor:
    with torch.no_grad():
        y: Tensor = module(*tokens)
    return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    ("weight_format", "scale_fmt"),
    [
        ("fp8_block128", "float"),
        ("fp8_block128", "ue8m0"),
        ("fp8_tensor", "float"),
        ("mxfp4", "ue8m0"),
    ],
)
def test_quantised_experts_compute_what_transformers_numbers_of_them_do(
    weight_format: str, scale_fmt: str, gated: bool, dtype: torch.dtype
) -> None:
    module = fp8_experts(weight_format, scale_fmt, gated)
    x, ids, weights = tokens_for(dtype=dtype)
    ids[0, 0] = EXPERTS  # as transformers marks what another rank computes
    y = called(module, x, ids, weights)
    assert y.dtype == dtype
    wanted = expected(module, x, ids, weights)
    assert reference.relative_error(y, wanted) <= LIMIT[dtype]
    assert module._moeos_ready.experts.cfg.weight_format == weight_format


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weight_format", ["fp8_block128", "fp8_tensor", "mxfp4"])
def test_tokens_are_rounded_where_register_says_so(weight_format: str, dtype: torch.dtype) -> None:
    module = fp8_experts(weight_format, "ue8m0" if weight_format == "mxfp4" else "float")
    tokens = tokens_for(dtype=dtype)
    before = called(module, *tokens)
    adapter.register(activation_format="fp8_group128")
    y = called(module, *tokens)
    cfg = module._moeos_ready.experts.cfg
    assert (cfg.weight_format, cfg.activation_format) == (weight_format, "fp8_group128")
    numbers = in_numbers(module, torch.float64)
    x, ids, weights = tokens
    w1, w2 = numbers.gate_up_proj, numbers.down_proj
    wanted = reference.moe(x, torch.zeros(EXPERTS, HIDDEN), w1, w2, cfg, ids, weights)
    assert reference.relative_error(y, wanted) <= reference.tolerance_of(cfg)
    assert reference.relative_error(before, wanted) > reference.tolerance_of(cfg)
    adapter.register()
    assert torch.equal(called(module, *tokens), before)


@pytest.mark.parametrize(
    ("weight_format", "scale_fmt"), [("fp8_block128", "float"), ("mxfp4", "ue8m0")]
)
def test_codes_and_scales_are_read_where_they_lie(weight_format: str, scale_fmt: str) -> None:
    module = fp8_experts(weight_format, scale_fmt)
    tokens = tokens_for(rows=3)
    called(module, *tokens)
    own = transformers_weights.weights_of(module)
    used = transformers_quantized.coded(own, module._moeos_ready.experts.cfg.weight_format)
    assert used.w1_scale is not None
    names = ("gate_up_proj", "down_proj")
    assert [used.w1.data_ptr(), used.w2.data_ptr(), used.w1_scale.data_ptr()] == [
        *(getattr(module, name).data_ptr() for name in names),
        module.gate_up_proj_scale_inv.data_ptr(),
    ]


@pytest.mark.parametrize("dtype", ["ue8m0", torch.bfloat16, torch.float16], ids=str)
def test_scales_of_another_dtype_are_those_of_the_call_however_they_were_written(
    dtype: Any,
) -> None:
    """`.data` is written without a version that says so."""
    module = fp8_experts(scale_fmt="ue8m0" if dtype == "ue8m0" else "float")
    if dtype != "ue8m0":
        for name in ("gate_up_proj_scale_inv", "down_proj_scale_inv"):
            getattr(module, name).data = getattr(module, name).data.to(dtype)
    tokens = tokens_for()
    before = called(module, *tokens)
    scale = module.gate_up_proj_scale_inv
    scale.data.copy_((scale.data.float() * 2).to(scale.dtype))
    y = called(module, *tokens)
    assert reference.relative_error(y, expected(module, *tokens)) <= LIMIT[torch.float32]
    assert reference.relative_error(y, before) > 0.1


def test_a_quantised_module_is_compiled_whole_behind_its_first_call() -> None:
    module = fp8_experts(scale_fmt="ue8m0")
    tokens = tokens_for()
    wanted = called(module, *tokens)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    assert torch.equal(called(compiled, *tokens), wanted)


def saved(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", [copy.deepcopy, saved])
def test_a_copy_of_a_quantised_module_has_codes_of_its_own(how: Any) -> None:
    module = fp8_experts(scale_fmt="ue8m0")
    module.__class__ = finegrained_fp8.FP8Experts  # which pickle finds, and which calls nothing
    tokens = tokens_for()
    with torch.no_grad():
        wanted = adapter.experts_forward(module, *tokens)
        copied = how(module)
        module.down_proj_scale_inv.view(torch.uint8).add_(3)
        assert torch.equal(adapter.experts_forward(copied, *tokens), wanted)
        assert not torch.equal(adapter.experts_forward(module, *tokens), wanted)


# --- What is refused ---


def cast(module: Any, name: str, dtype: torch.dtype) -> Any:
    parameter = getattr(module, name)
    made = parameter.data.float() if parameter.dtype != torch.int8 else parameter.data
    setattr(module, name, torch.nn.Parameter(made.to(dtype), requires_grad=False))
    return module


def with_shape(module: Any, name: str, *shape: int) -> Any:
    setattr(module, name, torch.nn.Parameter(torch.ones(shape), requires_grad=False))
    return module


def static() -> Any:
    module = fp8_experts()
    module.activation_scheme = "static"
    return module


def with_block(size: list[int]) -> Any:
    module = fp8_experts()
    module.block_size = size
    return module


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (static, ValueError, r"activation_scheme is 'static'.*'dynamic' does.*dequantize=True"),
    (lambda: with_block([64, 64]), ValueError, r"block_size is \[64, 64\].*\[128, 128\] and None"),
    (
        lambda: fp8_experts(moe_intermediate_size=192),
        ValueError,
        r"the intermediate size is 192.*multiples of 128.*share a block.*dequantize=True",
    ),
    (
        lambda: fp8_experts("fp8_tensor", moe_intermediate_size=72),
        ValueError,
        "intermediate is 72; it must be a multiple of 16 with weight_format 'fp8_tensor'",
    ),
    (
        lambda: cast(fp8_experts(), "down_proj", torch.float8_e5m2),
        ValueError,
        r"the dtype of down_proj is torch.float8_e5m2.*torch.float8_e4m3fn does.*dequantize=True",
    ),
    (
        lambda: fp8_experts().bfloat16(),
        ValueError,
        "the dtype of gate_up_proj is torch.bfloat16.*beside gate_up_proj_scale_inv .*do not cast",
    ),
    (
        lambda: cast(fp8_experts(), "down_proj_scale_inv", torch.float64),
        ValueError,
        "the dtype of down_proj_scale_inv is torch.float64.*torch.float32 and ",
    ),
    (
        lambda: fp8_experts("mxfp4", "float"),
        ValueError,
        "the dtype of gate_up_proj_scale_inv is torch.float32.*torch.float8_e8m0fnu does.*'ue8m0'",
    ),
    (
        lambda: with_shape(fp8_experts(), "gate_up_proj_scale_inv", EXPERTS, 2, 1),
        ValueError,
        r"gate_up_proj_scale_inv has shape \[8, 2, 1\]; it must be \[8, 2, 2\]",
    ),
    (
        lambda: with_shape(fp8_experts("fp8_tensor"), "down_proj_scale_inv", EXPERTS, 2, 1),
        ValueError,
        r"down_proj_scale_inv has shape \[8, 2\]; it must be \[8, 1\]",
    ),
]


@pytest.mark.parametrize(("made", "error", "said"), REFUSED)
def test_what_is_no_format_of_moeos_is_refused_by_name(
    made: Any, error: type[Exception], said: str
) -> None:
    module = made()
    with pytest.raises(error, match=f"transformers with moeos, FP8Experts: .*{said}"):
        called(module, *tokens_for(rows=2))


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("how", ["None", "deleted"])
@pytest.mark.parametrize(
    "names",
    [
        ("gate_up_proj_scale_inv",),
        ("down_proj_scale_inv",),
        ("gate_up_proj_scale_inv", "down_proj_scale_inv"),
    ],
    ids=str,
)
def test_codes_without_scales_are_refused_by_the_modules_name_of_them(
    names: tuple[str, ...], how: str, called_before: bool
) -> None:
    module, tokens = fp8_experts(), tokens_for(rows=5)
    wanted = called(module, *tokens) if called_before else None
    scales = {name: getattr(module, name) for name in names}
    for name in names:
        if how == "None":
            setattr(module, name, None)
        else:
            delattr(module, name)
    said = rf"FP8Experts: {names[0]} is None, which .*: load that of the checkpoint, or .*dequant"
    for _ in range(2):
        with pytest.raises(ValueError, match=said):
            called(module, *tokens)
    for name, scale in scales.items():  # as the error says
        setattr(module, name, scale)
    if wanted is not None:
        assert torch.equal(called(module, *tokens), wanted)


def test_blocks_without_scales_are_refused_by_the_modules_name_of_them() -> None:
    sizes = {"num_local_experts": EXPERTS, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
    of_gpt_oss = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "hidden_act": "silu"}
    config = types.SimpleNamespace(**sizes, **of_gpt_oss, _experts_implementation="moeos")
    module = transformers_mxfp4.MoeosMxfp4Experts(config)
    module.gate_up_proj_scales = module.down_proj_scales = None
    with pytest.raises(ValueError, match=r"gate_up_proj_scales is None, which moeos does not do"):
        called(module, *tokens_for(rows=5))


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("gate_up_proj_scale_inv", (EXPERTS, 2, 1), r"shape \[8, 2, 1\]; it must be \[8, 2, 2\]"),
        ("down_proj_scale_inv", (1, 2, 1), r"shape \[1, 2, 1\]; it must be \[8, 2, 1\]"),
    ],
)
def test_scales_that_get_another_shape_after_a_call_are_refused_by_the_modules_name_of_them(
    name: str, shape: tuple[int, ...], said: str
) -> None:
    module, tokens = fp8_experts(), tokens_for(rows=5)
    called(module, *tokens)
    getattr(module, name).data = torch.ones(shape)
    with pytest.raises(ValueError, match=f"FP8Experts: {name} has {said}"):
        called(module, *tokens)


@pytest.mark.parametrize("names", [("gate_up_proj", "down_proj"), ("down_proj",)], ids=len)
def test_codes_whose_memory_lies_along_outputs_are_refused_and_the_remedy_works(
    names: tuple[str, ...],
) -> None:
    module, tokens = fp8_experts(), tokens_for()
    wanted = called(module, *tokens)
    for name in names:
        codes = getattr(module, name)
        codes.data = codes.data.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match=r"strides of the experts' matrices .* contiguous ones do"):
        called(module, *tokens)
    for name in names:  # as the error says
        getattr(module, name).data = getattr(module, name).data.contiguous()
    assert torch.equal(called(module, *tokens), wanted)


def test_tokens_of_a_dtype_that_nothing_computes_are_refused() -> None:
    module = fp8_experts()
    with pytest.raises(ValueError, match=r"the tokens' dtype on cpu is torch.float16.*bfloat16"):
        called(module, *tokens_for(rows=2, dtype=torch.float16))


# --- Models ---


def save_quantised(folder: Path, **changes: Any) -> PreTrainedModel:
    """A tiny model whose experts a checkpoint has in FP8; what it returns is in numbers."""
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": INTERMEDIATE}
    model = tiny("qwen3_moe", **sizes, **changes)
    model.config.quantization_config = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": NO_CONVERSION,
    }
    model.config.save_pretrained(folder)
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        prefix, _, last = name.rpartition(".")
        if last not in ("gate_up_proj", "down_proj"):
            tensors[name] = tensor
            continue
        called_so = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
        for expert, stacked in enumerate(tensor):
            for theirs, matrix in zip(called_so, stacked.chunk(len(called_so)), strict=True):
                codes, scale, _ = quantize_matrix(matrix, "fp8_block128", 1)
                tensors[f"{prefix}.{expert}.{theirs}.weight"] = codes
                tensors[f"{prefix}.{expert}.{theirs}.weight_scale_inv"] = scale
    save_file({name: part.contiguous() for name, part in tensors.items()}, folder / FILE)
    # Without a GPU transformers makes numbers of it.
    return Qwen3MoeForCausalLM.from_pretrained(
        folder, experts_implementation="eager", dtype=torch.float32
    )


def save_mxfp4(folder: Path, **changes: Any) -> PreTrainedModel:
    """A tiny gpt-oss whose experts a checkpoint has in MXFP4; what it returns is in numbers."""
    model = tiny("gpt_oss", **changes)
    model.config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    model.config.save_pretrained(folder)
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            codes, scales, _ = quantize_matrix(tensor.mT.contiguous(), "mxfp4", 1)
            tensors[f"{name}_blocks"] = codes.unflatten(-1, (-1, 16))
            tensors[f"{name}_scales"] = scales
        else:
            tensors[name] = tensor
    save_file({name: part.contiguous() for name, part in tensors.items()}, folder / FILE)
    return GptOssForCausalLM.from_pretrained(
        folder, experts_implementation="eager", dtype=torch.float32
    )


def test_gpt_oss_in_mxfp4_runs_with_the_line_that_others_do(tmp_path: Path) -> None:
    ids, again = prompt(), tmp_path / "again"
    in_full = save_mxfp4(tmp_path)
    assert {type(module).__name__ for module in experts_modules(in_full)} == {"GptOssExperts"}
    logits, tokens = answer(in_full, ids)
    model = GptOssForCausalLM.from_pretrained(
        tmp_path, experts_implementation="moeos", dtype=torch.float32
    )
    (module,) = experts_modules(model)
    assert module.gate_up_proj_blocks.dtype == torch.uint8
    ours, our_tokens = answer(model, ids)
    assert module._moeos_ready.experts.cfg.weight_format == "mxfp4"
    assert reference.relative_error(ours, logits) <= LIMIT[torch.float32]
    assert torch.equal(our_tokens, tokens)
    # Gate and up have changed their order, and nobody else sees it.
    model.save_pretrained(again)
    written, shipped = load_file(again / FILE), load_file(tmp_path / FILE)
    assert written.keys() == shipped.keys()
    for name, tensor in shipped.items():
        assert torch.equal(written[name], tensor), name
    copied = copy.deepcopy(model)
    assert torch.equal(answer(copied, ids)[0], ours)


def test_a_quantised_checkpoint_runs_with_the_line_that_others_do(tmp_path: Path) -> None:
    ids = prompt()
    logits, tokens = answer(save_quantised(tmp_path), ids)
    with fp8_on_a_cpu():
        model = Qwen3MoeForCausalLM.from_pretrained(
            tmp_path, experts_implementation="moeos", dtype=torch.float32
        )
    (module,) = experts_modules(model)
    assert module.gate_up_proj.dtype == torch.float8_e4m3fn
    ours, our_tokens = answer(model, ids)
    assert module._moeos_ready.experts.cfg.weight_format == "fp8_block128"
    assert reference.relative_error(ours, logits) <= LIMIT[torch.float32]
    assert torch.equal(our_tokens, tokens)


@pytest.mark.parametrize(
    ("save", "cls", "weight_format"),
    [
        (save_quantised, Qwen3MoeForCausalLM, "fp8_block128"),
        (save_mxfp4, GptOssForCausalLM, "mxfp4"),
    ],
)
def test_ranks_share_the_experts_of_a_quantised_checkpoint(
    save: Any, cls: Any, weight_format: str, tmp_path: Path
) -> None:
    ids = prompt(4)
    logits, _ = answer(save(tmp_path, **PARALLEL), ids)

    def live(rank: int) -> Any:
        torch.set_num_threads(1)
        os.environ.update(WORLD_SIZE="2", RANK=str(rank), LOCAL_RANK=str(rank))
        adapter.register(max_tokens=64, deadline=60.0)
        config = DistributedConfig(ep_implementation="moeos", tp_size=2, ep_size=2)
        with fp8_on_a_cpu():
            model = cls.from_pretrained(tmp_path, distributed_config=config, dtype=torch.float32)
        (module,) = experts_modules(model)
        ours, _ = answer(model, ids)
        experts = module._moeos_ready.experts
        return ours.numpy(), experts.world.size, experts.cfg.weight_format

    for outcome in in_processes(live, 2, 120.0):
        assert not isinstance(outcome, Exception), outcome
        ours, *of_experts = outcome
        assert of_experts == [2, weight_format]
        assert reference.relative_error(torch.from_numpy(ours), logits) <= LIMIT[torch.float32]


def test_slices_of_quantised_experts_are_refused_by_name_and_remedy() -> None:
    module = fp8_experts("fp8_block128")
    mesh = types.SimpleNamespace(size=lambda: 2, ndim=1)
    adapter.MoeosSlices().install_forward(module, mesh)
    module.config._experts_implementation = "moeos"
    match = r"FP8Experts: tp_size for quantized experts is 2, .*; ep_size = tp_size does"
    with pytest.raises(ValueError, match=match):
        module(*tokens_for())
