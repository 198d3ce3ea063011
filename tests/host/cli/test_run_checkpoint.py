# SPDX-License-Identifier: Apache-2.0
"""`moeos run` reads config and weights of a layer of a Hugging Face model as they were saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.host.cli import commands
from tests.tiny_models import make

RUN = ("--backend", "twin", "--ranks", "2", "--iterations", "1", "--tokens", "16")


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
    code, out, err = commands.invoke(
        *("run", str(folder / "layer.toml"), "--weights", str(folder / "model")),
        *("--prefix", "model.layers.1.mlp", *RUN),
    )
    assert code == 0, err
    assert "error" in out


def test_config_and_command_must_both_say_that_shared_experts_are_added_elsewhere(
    folder: Path,
) -> None:
    config = (folder / "layer.toml").read_text()
    (folder / "routed.toml").write_text(config + "hf_shared = false\n")
    ignore = ("--ignore", "shared_experts.")

    def run(name: str, *options: str) -> tuple[int, str]:
        code, _, err = commands.invoke(
            *("run", str(folder / name), "--weights", str(folder / "model")),
            *("--prefix", "model.layers.1.mlp", *options, *RUN),
        )
        return code, err

    assert run("routed.toml", *ignore)[0] == 0
    code, err = run("routed.toml")
    assert code == 2
    assert "is not used by the layer, whose shared_experts is 0" in err
    assert "pass ignore=['shared_experts.']" in err
    code, err = run("layer.toml", *ignore)
    assert code == 2
    assert "is the layer's, whose shared_experts is 1: leave it out of ignore" in err
