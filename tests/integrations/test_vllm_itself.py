# SPDX-License-Identifier: Apache-2.0
"""vLLM with moeos, on CPUs: its greedy tokens are those of vLLM alone, and its types fit.

vLLM has an environment of its own, which is made at need. Without a package index that has it these
tests are skipped.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.integrations import environments
from tests.integrations.greedy import MARK
from tests.processes import ROOT

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]

FILE = "model.safetensors"
EAGER = {"enforce_eager": True}
MOEOS = {"quantization": "moeos", "additional_config": {"moeos": {"deadline": 120.0}}}
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.5,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def python() -> Path:
    return environments.with_vllm()


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.Qwen3MoeConfig(**SIZES, head_dim=32, norm_topk_prob=True)
    return saved(config, tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a shared expert beside the routed ones."""
    config = transformers.Qwen2MoeConfig(**SIZES, shared_expert_intermediate_size=96)
    return saved(config, tmp_path_factory.mktemp("qwen2"))


def saved(
    config: transformers.PreTrainedConfig, folder: Path, dtype: torch.dtype = torch.float32
) -> Path:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    return folder


SCALE = 1 / 64  # a power of two: a code of FP8 times it is a bfloat16
SKIPPED = [
    f"model.layers.{layer}.{name}"
    for layer in range(SIZES["num_hidden_layers"])
    for name in (*(f"self_attn.{one}_proj" for one in "qkvo"), "mlp.gate")
]
"""What the checkpoint has in numbers: vLLM's own FP8 layers need a GPU."""


@pytest.fixture(scope="module")
def in_fp8_and_in_numbers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints with the same weights."""
    sizes = SIZES | {"moe_intermediate_size": 256}
    config = transformers.Qwen3MoeConfig(**sizes, head_dim=32, norm_topk_prob=True)
    plain = saved(config, tmp_path_factory.mktemp("plain"), torch.bfloat16)
    coded = tmp_path_factory.mktemp("fp8")
    numbers = load_file(plain / FILE)
    parts = {}
    for name, tensor in numbers.items():
        if ".experts." not in name:
            parts[name] = tensor
            continue
        codes = (tensor.float() / SCALE).to(torch.float8_e4m3fn)
        numbers[name] = (codes.float() * SCALE).bfloat16()
        blocks = [-(-length // 128) for length in tensor.shape]
        parts |= {name: codes, f"{name}_scale_inv": torch.full(blocks, SCALE)}
    save_file(numbers, plain / FILE, {"format": "pt"})
    save_file(parts, coded / FILE, {"format": "pt"})
    config.quantization_config = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": [*SKIPPED, "lm_head"],
    }
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(coded)
    return coded, plain


def greedy(python: Path, model: Path, **options: Any) -> tuple[list[list[int]], int]:
    """The tokens that vLLM chooses, and how many layers of how many ranks moeos computed.

    Skips the test where vLLM alone does not run.
    """
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "INFO",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    program = str(Path(__file__).with_name("greedy.py"))
    ended = subprocess.run(
        [str(python), program, str(model), json.dumps(options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
        env=environment,
        cwd=model,
    )
    found = re.search(f"^{MARK}(.*)$", ended.stdout, re.MULTILINE)
    if not found and "quantization" not in options:
        pytest.skip(f"vLLM alone does not run here: {ended.stdout[-300:]}")
    assert found, ended.stdout[-5000:]
    tokens: list[list[int]] = json.loads(found.group(1))
    return tokens, len(re.findall(r"experts of rank \d+ of \d+ by moeos", ended.stdout))


LAYERS = SIZES["num_hidden_layers"]


def test_greedy_tokens_are_vllm_s(python: Path, qwen3: Path) -> None:
    stock, none = greedy(python, qwen3, **EAGER)
    tokens, layers = greedy(python, qwen3, **EAGER, **MOEOS)
    assert tokens == stock
    assert (none, layers) == (0, LAYERS)


@pytest.mark.parametrize("whole", [True, False], ids=["whole experts", "slices"])
def test_greedy_tokens_of_two_tensor_parallel_ranks_are_vllm_s(
    python: Path, qwen2: Path, whole: bool
) -> None:
    stock, _ = greedy(python, qwen2, **EAGER)
    two = {"tensor_parallel_size": 2, "enable_expert_parallel": whole}
    tokens, layers = greedy(python, qwen2, **EAGER, **MOEOS, **two)
    assert tokens == stock
    assert layers == 2 * LAYERS


def test_greedy_tokens_of_a_compiled_model_are_vllm_s(python: Path, qwen3: Path) -> None:
    stock, _ = greedy(python, qwen3, **EAGER)
    tokens, layers = greedy(python, qwen3, **MOEOS)
    assert tokens == stock
    assert layers == LAYERS


@pytest.mark.parametrize("ranks", [1, 2])
def test_greedy_tokens_of_experts_in_fp8_are_those_of_the_same_numbers(
    python: Path, in_fp8_and_in_numbers: tuple[Path, Path], ranks: int
) -> None:
    options = EAGER | MOEOS | {"dtype": "bfloat16"}
    if ranks > 1:
        options |= {"tensor_parallel_size": ranks, "enable_expert_parallel": True}
    coded, plain = in_fp8_and_in_numbers
    expected, _ = greedy(python, plain, **options)
    tokens, layers = greedy(python, coded, **options)
    assert tokens == expected
    assert layers == ranks * LAYERS


def test_mypy_is_content_with_the_adapter_beside_vllm_s_own_types(
    python: Path, tmp_path: Path
) -> None:
    environments.run(python, "-m", "pip", "install", "--quiet", "mypy==2.4.1")
    (tmp_path / "moeos").symlink_to(ROOT / "host" / "moeos", target_is_directory=True)
    files = [f"moeos/integrations/{name}.py" for name in ("vllm", "vllm_experts", "vllm_quantized")]
    options = ["--config-file", ROOT / "pyproject.toml", "--python-version", "3.11"]
    silent = ["--follow-imports", "silent", "--cache-dir", ROOT / ".mypy_cache" / "vllm"]
    probe = tmp_path / "probe.py"
    probe.write_text(
        "from vllm.model_executor.layers.fused_moe import modular_kernel as mk\n"
        "reveal_type(mk.FusedMoEExpertsModular.apply)\n"
    )
    command = [python, "-m", "mypy", *options, *silent, *files, probe]
    ended = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        cwd=tmp_path,
    )
    # vLLM's types are there, and not Any.
    assert "topk_ids: torch._tensor.Tensor" in ended.stdout, ended.stdout
    assert "Success" in ended.stdout, ended.stdout
