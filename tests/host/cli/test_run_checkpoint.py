# SPDX-License-Identifier: Apache-2.0
"""`moeos run` reads config and weights of a layer of a Hugging Face model as they were saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.host.cli import commands
from tests.tiny_models import make

RUN = ("--backend", "twin", "--virtual-ranks", "2", "--iterations", "1", "--tokens", "16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers, in shards, beside the file that names its second."""
    folder = tmp_path_factory.mktemp("checkpoint")
    _, model = make("deepseek_v3", num_hidden_layers=2, first_k_dense_replace=1)
    model.save_pretrained(folder / "model", max_shard_size="100KB")
    assert len(list((folder / "model").glob("*.safetensors"))) > 2
    (folder / "layer.toml").write_text(
        'hf_config = "model/config.json"\nhf_layer = 1\nmax_tokens = 64\n'
    )
    return folder


def test_a_layer_of_a_model_runs_from_its_own_files(folder: Path) -> None:
    options = ("--prefix", "model.layers.1.mlp", "--ignore", "shared_experts.")
    code, out, err = commands.invoke(
        "run", str(folder / "layer.toml"), "--weights", str(folder / "model"), *options, *RUN
    )
    assert code == 0, err
    assert "error" in out


def test_shared_experts_end_the_command_until_it_is_told_that_they_are_added(folder: Path) -> None:
    code, _, err = commands.invoke(
        *("run", str(folder / "layer.toml"), "--weights", str(folder / "model")),
        *("--prefix", "model.layers.1.mlp", *RUN),
    )
    assert code == 2
    assert "is not used by the layer, which has routed experts alone" in err
    assert "pass ignore=['shared_experts.']" in err
