"""vLLM with moeos, on CPUs: its greedy tokens are those of vLLM alone, and its types fit.

vLLM has an environment of its own, which is made at need. Without a package index that has it these
tests are skipped.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.integrations import environments
from tests.integrations.greedy import MARK
from tests.processes import ROOT, shared_memory

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]

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


def saved(config: transformers.PreTrainedConfig, folder: Path) -> Path:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


def greedy(python: Path, model: Path, **options: Any) -> dict[str, Any]:
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # its workers tell what their layers are
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    program = Path(__file__).with_name("greedy.py")
    printed = environments.run(
        python, program, model, json.dumps(options), seconds=600, env=environment, cwd=model
    )
    found = re.search(f"^{MARK}(.*)$", printed, re.MULTILINE)
    assert found, printed
    answer: dict[str, Any] = json.loads(found.group(1))
    return answer


def test_greedy_tokens_are_vllm_s(python: Path, qwen3: Path) -> None:
    stock = greedy(python, qwen3, **EAGER)
    before = shared_memory()
    moeos = greedy(python, qwen3, **EAGER, **MOEOS)
    assert moeos["tokens"] == stock["tokens"]
    assert (stock["methods"], moeos["methods"]) == (
        [["UnquantizedFusedMoEMethod"]],
        [["MoeosMethod"]],
    )
    assert shared_memory() <= before


def test_greedy_tokens_of_two_tensor_parallel_ranks_are_vllm_s(python: Path, qwen2: Path) -> None:
    stock = greedy(python, qwen2, **EAGER)
    two = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    moeos = greedy(python, qwen2, **EAGER, **MOEOS, **two)
    assert moeos["tokens"] == stock["tokens"]
    assert moeos["methods"] == [["MoeosMethod"]] * 2


def test_greedy_tokens_of_a_compiled_model_are_vllm_s(python: Path, qwen3: Path) -> None:
    stock = greedy(python, qwen3, **EAGER)
    moeos = greedy(python, qwen3, **MOEOS)
    assert moeos["tokens"] == stock["tokens"]
    assert moeos["methods"] == [["MoeosMethod"]]


def test_mypy_is_content_with_the_adapter_beside_vllm_s_own_types(
    python: Path, tmp_path: Path
) -> None:
    environments.run(python, "-m", "pip", "install", "--quiet", "mypy==2.4.1")
    (tmp_path / "moeos").symlink_to(ROOT / "host", target_is_directory=True)
    files = [f"moeos/integrations/{name}.py" for name in ("vllm", "vllm_experts")]
    options = ["--config-file", ROOT / "pyproject.toml", "--python-version", "3.11"]
    silent = ["--follow-imports", "silent", "--cache-dir", ROOT / ".mypy_cache" / "vllm"]
    probe = tmp_path / "probe.py"
    probe.write_text(
        "from vllm.model_executor.layers.fused_moe import modular_kernel as mk\n"
        "reveal_type(mk.FusedMoEExpertsModular.apply)\n"
    )
    said = environments.run(
        python, "-m", "mypy", *options, *silent, *files, probe, seconds=900, cwd=tmp_path
    )
    assert "topk_ids: torch._tensor.Tensor" in said  # vLLM's types are there, and not Any
    assert "Success" in said
