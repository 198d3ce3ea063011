"""`moeos plan`: every config of the repository has a plan, quickly, and bad input a line."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from moeos import MoEConfig
from moeos.engines.twin import sizes_of
from tests.host.cli import commands
from tests.processes import ROOT

CONFIGS = sorted((ROOT / "configs").glob("*.toml"))


invoke = functools.partial(commands.invoke, "plan")


def test_the_repository_has_the_configs_that_it_promises() -> None:
    models = {"mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3", "olmoe-7b"}
    assert models | {"demo", "thesis", "twin-bench"} <= {path.stem for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_names_its_source_and_has_a_plan_for_8_ranks(path: Path, tmp_path: Path) -> None:
    assert path.read_text().startswith("# ")
    code, out, err = invoke(path, "--json", tmp_path / "plan.json")
    assert (code, err) == (0, "")
    plan = json.loads((tmp_path / "plan.json").read_text())
    cfg = MoEConfig.from_toml(path)
    assert plan["ranks"] == 8
    assert plan["call"]["tokens"] == cfg.max_tokens
    for row_map in ("ragged", "capacity"):
        assert plan["sizes"][row_map]["heap_bytes"] > 0
        assert row_map in out
    own = plan["sizes"][cfg.resolved_row_map]
    assert own["heap_bytes"] == sizes_of(cfg, 8, processors=1).heap_bytes
    assert set(plan["floor_seconds"]) == {"compute", "link", "memory"}


def test_tokens_and_ranks_can_be_chosen(tmp_path: Path) -> None:
    options = ("--ranks", 4, "--tokens", 16, "--json", tmp_path / "plan.json")
    code, out, _ = invoke(ROOT / "configs" / "demo.toml", *options)
    assert code == 0
    assert "4 ranks with 4 of 16 experts" in out
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["call"]["pairs_sent"] == plan["call"]["pairs_received"] == 32


def test_a_layer_that_the_runtime_cannot_number_is_refused(tmp_path: Path) -> None:
    huge = tmp_path / "huge.toml"
    text = (ROOT / "configs" / "demo.toml").read_text()
    huge.write_text(text.replace("max_tokens = 512", "max_tokens = 100000000"))
    code, out, err = invoke(huge)
    assert (code, out) == (2, "")
    assert "lower max_tokens" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.toml"], "moeos: absent.toml: No such file or directory\n"),
        (
            [ROOT / "configs" / "mixtral-8x7b.toml", "--ranks", "3"],
            "moeos: experts is 8 and cannot be divided equally among 3 ranks; start a number of "
            "ranks that divides 8\n",
        ),
        (
            [ROOT / "configs" / "demo.toml", "--tokens", "513"],
            "moeos: tokens is 513; allowed: 0 to max_tokens, 512\n",
        ),
    ],
    ids=["no-file", "ranks", "tokens"],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[object], message: str) -> None:
    assert invoke(*arguments) == (2, "", message)
