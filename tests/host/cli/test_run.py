# SPDX-License-Identifier: Apache-2.0
"""`moeos run` in one process: its sources of tokens and weights, its results, its exit codes."""

from __future__ import annotations

import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeos import MoELayer, PeerTimeout
from moeos.cli.shared import output
from moeos.system import host_memory
from tests.host.cli import commands
from tests.processes import MOEOS, ROOT, forked

CONFIG = """
hidden = 32
intermediate = 48
experts = 8
top_k = 2
dtype = "float32"
max_tokens = 64
"""

Outcome = tuple[int, str, str]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "layer.toml"
    path.write_text(CONFIG + "[run]\ntokens = 40\niterations = 3\n")
    return path


invoke = functools.partial(commands.invoke, "run")


def results(config: Path, *arguments: object) -> dict[str, Any]:
    """The JSON of a run that must pass."""
    path = config.with_suffix(".json")
    code, _, err = invoke(config, "--json", path, *arguments)
    assert code == 0, err
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def draw_block(prefix: str, experts: int = 8) -> dict[str, torch.Tensor]:
    """A block under Mixtral's names."""
    tensors = {f"{prefix}gate.weight": torch.randn(experts, 32)}
    for expert in range(experts):
        for name, shape in (("w1", (48, 32)), ("w2", (32, 48)), ("w3", (48, 32))):
            tensors[f"{prefix}experts.{expert}.{name}.weight"] = torch.randn(shape) / 6
    return tensors


def test_the_demos_config_passes_and_ends_with_the_error_line() -> None:
    code, out, _ = invoke(ROOT / "configs" / "demo.toml", "--iterations", 3)
    assert code == 0
    last = out.rstrip().splitlines()[-1]
    found = re.fullmatch(r"max relative error (\d\.\de-\d\d) \(tolerance 8\.0e-03\)", last)
    assert found
    assert 1e-4 < float(found[1]) <= 8e-3  # bfloat16 rounds: no error would be no check
    for label in ("tokens", "pairs sent to rank 0", "product0 tasks", "hottest expert"):
        assert label in out


def test_the_demos_text_is_skewed_over_the_experts(tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    invoke(ROOT / "configs" / "demo.toml", "--iterations", 3, "--json", path)
    rank = json.loads(path.read_text())["by_rank"][0]
    assert rank["hottest_expert"]["pairs"] > 2 * sum(rank["expert_pairs"]) / 16


@pytest.mark.parametrize("pattern", ["uniform", "zipf:1.2", "one-expert"])
def test_a_synthetic_routing_passes_the_check(config: Path, pattern: str) -> None:
    document = results(config, "--routing", pattern)
    assert document["max_relative_error"] <= document["tolerance"] == 1e-5
    assert document["source"] == f"random tokens, {pattern} routing"
    (rank,) = document["by_rank"]
    assert rank["tokens"] == [40, 40, 40]
    assert rank["check"]["checked"] == 120
    pairs = 120 if pattern == "one-expert" else 240
    assert sum(rank["expert_pairs"]) == pairs
    if pattern == "one-expert":
        assert rank["expert_pairs"][0] == 120


@pytest.mark.parametrize(
    "rules",
    [
        'scoring = "sqrtsoftplus"\nselection_bias = true\nrouter_bias = true\n',
        "expert_scale = true\n",
        "zero_experts = 5\nrenormalize = false\n",
        "shared_experts = 2\nshared_intermediate = 24\nshared_gate = true\n",
        'weight_format = "fp8_block128"\nbias = true\n',
    ],
)
def test_a_layer_with_rules_of_its_own_passes_the_check(rules: str, tmp_path: Path) -> None:
    path = tmp_path / "layer.toml"
    path.write_text(CONFIG + rules + "[run]\ntokens = 40\n")
    document = results(path, "--ranks", 2)
    assert document["max_relative_error"] <= document["tolerance"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_whose_tokens_are_codes_passes_the_check(dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "layer.toml"
    sizes = CONFIG.replace("32\n", "128\n", 1).replace("48", "64").replace("float32", dtype)
    codes = 'weight_format = "fp8_channel"\nactivation_format = "fp8_group128"\n'
    codes += 'result_format = "fp8_group128"\n'
    path.write_text(sizes + codes + "[run]\ntokens = 40\n")
    document = results(path, "--ranks", 2)
    assert document["max_relative_error"] <= document["tolerance"] == 3e-2
    _, out, _ = invoke(path, "--no-check")
    assert "in fp8_channel, tokens in fp8_group128, results in fp8_group128" in " ".join(
        out.split()
    )


def test_the_json_tells_what_ran_where(config: Path) -> None:
    document = results(config, "--seed", 5)
    assert document["config"]["hidden"] == 32
    assert document["config"]["dtype"] == "float32"
    assert (document["ranks"], document["calls"], document["seed"]) == (1, 3, 5)
    assert document["versions"]["torch"] == torch.__version__
    assert document["machine"]["cores"] >= 1
    assert len(document["by_rank"][0]["seconds"]) == 3


def test_virtual_ranks_are_ranks_of_one_process(config: Path) -> None:
    document = results(config, "--ranks", 4)
    assert document["ranks"] == 4
    assert [rank["tokens"] for rank in document["by_rank"]] == [[40] * 3] * 4
    assert all(rank["check"]["checked"] >= 119 for rank in document["by_rank"])


@pytest.mark.parametrize("parallel", ["tensor", "sharded_tokens"])
@pytest.mark.parametrize(
    "rules",
    [
        "bias = true\n",
        "shared_experts = 2\nshared_intermediate = 24\nshared_gate = true\n",
        'weight_format = "fp8_channel"\nactivation = "gelu"\n',
    ],
)
def test_experts_may_be_sliced(rules: str, parallel: str, tmp_path: Path) -> None:
    path = tmp_path / "layer.toml"
    path.write_text(CONFIG.replace("48", "96") + rules + "[run]\ntokens = 40\nvary_tokens = true\n")
    document = results(path, "--ranks", 3, "--parallel", parallel)
    assert document["max_relative_error"] <= document["tolerance"]
    assert document["parallel"] == parallel
    tokens = [rank["tokens"] for rank in document["by_rank"]]
    assert (tokens[0] == tokens[1] == tokens[2]) == (parallel == "tensor")
    assert all(rank["experts"] == list(range(8)) for rank in document["by_rank"])


@pytest.mark.parametrize("parallel", ["tensor", "sharded_tokens"])
def test_groups_of_ranks_have_slices_of_their_experts(parallel: str, tmp_path: Path) -> None:
    path = tmp_path / "layer.toml"
    path.write_text(CONFIG + "bias = true\n[run]\ntokens = 40\nvary_tokens = true\n")
    options = ("--ranks", 4, "--parallel", parallel, "--tensor-ranks", 2)
    document = results(path, *options)
    assert document["max_relative_error"] <= document["tolerance"]
    assert (document["parallel"], document["tensor_ranks"]) == (parallel, 2)
    tokens = [rank["tokens"] for rank in document["by_rank"]]
    assert tokens[0] != tokens[2]
    assert (tokens[0] == tokens[1]) == (tokens[2] == tokens[3]) == (parallel == "tensor")
    held = [rank["experts"] for rank in document["by_rank"]]
    assert held == [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]]
    code, said, err = invoke(path, *options)
    assert code == 0, err
    assert "each, 2 with slices of the same experts" in said
    code, _, err = invoke(path, *options[:-1], 3)
    assert code == 2
    assert "moeos: --tensor-ranks is 3; it must be a number that divides the 4 ranks" in err


def test_sliced_experts_say_so_and_write_each_token_once(config: Path, tmp_path: Path) -> None:
    save_file({"x": torch.randn(30, 32)}, tmp_path / "x.safetensors")
    given = ("--input", tmp_path / "x.safetensors", "--iterations", 1)
    written = []
    for parallel in ("expert", "tensor", "sharded_tokens"):
        out = tmp_path / f"{parallel}.safetensors"
        options = (*given, "--output", out, "--parallel", parallel, "--ranks", 2)
        code, said, err = invoke(config, *options)
        assert code == 0, err
        assert ("with a slice of each expert" in said) == (parallel != "expert")
        written.append(load_file(out))
    for other in written[1:]:
        assert torch.equal(other["x"], written[0]["x"])
        assert torch.allclose(other["y"], written[0]["y"], atol=1e-5)


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        (("--parallel", "tensor"), 120),
        (("--parallel", "tensor", "--tensor-ranks", 2), 240),
        (("--parallel", "sharded_tokens", "--tensor-ranks", 2), 480),
        ((), 480),
    ],
    ids=str,
)
def test_each_expert_and_each_token_is_told_of_once_in_however_many_slices(
    options: tuple[object, ...], tokens: int, config: Path, tmp_path: Path
) -> None:
    config.write_text(config.read_text().replace("48", "64"))
    path = tmp_path / "run.json"
    routed = ("--routing", "one-expert", "--json", path)  # which no token is near a tie with
    code, said, err = invoke(config, "--ranks", 4, *options, *routed)
    assert code == 0, err
    of = f"of {tokens} pairs (an even share is 12.5 %)"
    assert f"hottest of 8 experts: 0, with 100.0 % {of}" in said
    assert f"checked {tokens} of {tokens} tokens" in said
    share = re.search(r"its share of all pairs.*", said)
    assert share is not None
    assert "100.0 %" in share[0]
    ranks = json.loads(path.read_text())["by_rank"]
    slowest = sum(max(times) for times in zip(*(rank["seconds"] for rank in ranks), strict=True))
    assert f"{output.count(tokens / slowest)} tokens/s" in said
    # Each slice of the hottest expert has all of its pairs.
    pairs = [rank["hottest_expert"]["pairs"] for rank in ranks if 0 in rank["experts"]]
    assert set(pairs) == {tokens}


def test_a_layout_of_slices_is_what_the_options_say(config: Path) -> None:
    config.write_text(CONFIG.replace("64", "4"))
    options = ("--ranks", 2, "--parallel", "tensor", "--layout", "gathered")
    document = results(config, *options, "--reduce", "fused")
    assert document["max_relative_error"] <= document["tolerance"]
    assert (document["layout"], document["reduce"]) == ("gathered", "fused")
    assert {rank["tasks"]["dispatch"] for rank in document["by_rank"]} == {0}
    assert "layout='gathered'" in invoke(config, *options)[1]
    code, _, err = invoke(config, *options[:2], "--reduce", "fused")
    assert code == 2
    assert "--parallel is expert, --reduce fused; --reduce says" in err
    assert "give --parallel tensor" in err


def test_a_layout_of_whole_experts_leaves_them_whole(config: Path) -> None:
    document = results(config, "--ranks", 2, "--layout", "gathered")
    said = [document[name] for name in ("parallel", "tensor_ranks", "layout")]
    assert said == ["expert", 1, "gathered"]


def test_processes_add_up_partial_sums_behind_the_kernel(config: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    options = ("--parallel", "tensor", "--reduce", "after", "--backend", "twin")
    ended = forked(2, MOEOS, "run", str(config), *options, "--json", str(path))
    assert (ended.returncode, ended.stderr) == (0, "")
    document = json.loads(path.read_text())
    assert document["max_relative_error"] <= document["tolerance"]
    assert document["reduce"] == "after"
    assert [rank["row_bytes_to_peers"] for rank in document["by_rank"]] == [0, 0]


def test_ranks_of_one_process_have_nobody_to_add_up_behind_the_kernel(config: Path) -> None:
    options = ("--ranks", 2, "--parallel", "tensor", "--reduce", "after")
    code, _, err = invoke(config, *options)
    assert code == 2
    assert "--reduce is after, and torch.distributed" in err
    assert "give --reduce fused" in err


def test_sizes_that_slices_do_not_divide_are_refused(config: Path) -> None:
    code, _, err = invoke(config, "--ranks", 5, "--parallel", "tensor")
    assert code == 2
    assert "intermediate is 48; 5 ranks with --parallel tensor" in err
    code, _, err = invoke(config, "--parallel", "pipeline")
    assert code == 2
    assert "--parallel is pipeline; it must be expert or tensor or sharded_tokens" in err


def test_virtual_ranks_are_refused_under_a_launcher(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    code, _, err = invoke(config, "--ranks", 2)
    assert code == 2
    assert "a launcher has started several ranks" in err


def test_options_overrule_the_config(config: Path) -> None:
    document = results(config, "--tokens", 7, "--iterations", 2)
    assert document["by_rank"][0]["tokens"] == [7, 7]


def test_varied_tokens_are_0_to_the_limit_and_follow_the_seed(config: Path) -> None:
    config.write_text(CONFIG + "[run]\ntokens = 5\niterations = 60\nvary_tokens = true\n")
    first, again, other = (
        results(config, "--seed", seed)["by_rank"][0]["tokens"] for seed in (1, 1, 2)
    )
    assert set(first) == set(range(6))
    assert first == again
    assert first != other


def test_without_the_table_a_call_has_max_tokens(config: Path) -> None:
    config.write_text(CONFIG)
    assert results(config)["by_rank"][0]["tokens"] == [64] * 10


def test_weights_of_a_file_are_what_the_layer_has(config: Path, tmp_path: Path) -> None:
    path = tmp_path / "block.safetensors"
    prefix = "model.layers.0.block_sparse_moe."
    block = draw_block(prefix)
    block[f"{prefix}gate.weight"][3] = 0.0
    block[f"{prefix}gate.weight"][3, 0] = 100.0  # every second token's first choice
    save_file(block, path)
    document = results(config, "--weights", path, "--prefix", prefix)
    assert document["by_rank"][0]["hottest_expert"]["expert"] == 3


def test_what_a_file_has_beside_the_layer_must_be_ignored_by_name(
    config: Path, tmp_path: Path
) -> None:
    path = tmp_path / "block.safetensors"
    save_file(draw_block("") | {"shared_experts.up_proj.weight": torch.zeros(1)}, path)
    code, _, err = invoke(config, "--weights", path)
    assert code == 2
    assert "shared_experts.up_proj.weight is not used by the layer" in err
    results(config, "--weights", path, "--ignore", "shared_experts.")


def test_a_weight_that_the_file_lacks_is_named(config: Path, tmp_path: Path) -> None:
    path = tmp_path / "block.safetensors"
    save_file(draw_block("", experts=7) | {"gate.weight": torch.randn(8, 32)}, path)
    code, _, err = invoke(config, "--weights", path)
    assert code == 2
    assert "experts.7.w1.weight is missing" in err


def test_tokens_of_a_file_are_all_passed_in_each_call(config: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.randn(13, 32, dtype=torch.bfloat16)}, path)
    assert results(config, "--input", path)["by_rank"][0]["tokens"] == [13] * 3


def test_more_tokens_in_a_file_than_a_call_takes_need_a_number(
    config: Path, tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.randn(70, 32)}, path)
    code, _, err = invoke(config, "--input", path)
    assert code == 2
    assert "tokens is 70; allowed: 0 to max_tokens, 64, of this rank; give --tokens" in err
    assert results(config, "--input", path, "--tokens", 64)["by_rank"][0]["tokens"] == [64] * 3


def test_documents_can_be_named(config: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be")
    document = results(config, "--input-text", tmp_path / "*.txt")
    assert document["source"] == "tokens from 18 bytes of text"
    assert document["by_rank"][0]["tokens"] == [40] * 3


def test_the_reference_can_be_left_out(config: Path) -> None:
    code, out, _ = invoke(config, "--no-check", "--json", config.with_suffix(".json"))
    assert code == 0
    assert "max relative error" not in out
    assert json.loads(config.with_suffix(".json").read_text())["max_relative_error"] is None


def test_counters_are_written_for_prometheus_by_every_rank(config: Path, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="pip install prometheus_client")
    folder = tmp_path / "metrics"
    code, _, err = invoke(config, "--ranks", 2, "--prometheus", folder)
    assert code == 2
    assert f"--prometheus is {folder}; it must be a folder that exists" in " ".join(err.split())
    folder.mkdir()
    code, _, _ = invoke(config, "--ranks", 2, "--prometheus", folder)
    assert code == 0
    for rank in range(2):
        text = (folder / f"moeos-rank-{rank}.prom").read_text()
        assert f'moeos_calls_total{{layer="0",rank="{rank}"}} 3.0' in text


@pytest.mark.parametrize("wrong", [1.001, math.nan])
def test_a_wrong_output_is_exit_code_1(
    config: Path, monkeypatch: pytest.MonkeyPatch, wrong: float
) -> None:
    right = MoELayer.forward

    def forward(layer: MoELayer, *arguments: torch.Tensor | None) -> torch.Tensor:
        return right(layer, *arguments) * wrong  # type: ignore[arg-type]

    monkeypatch.setattr(MoELayer, "forward", forward)
    code, out, _ = invoke(config, "--json", config.with_suffix(".json"))
    assert code == 1
    assert out.rstrip().splitlines()[-1].startswith("max relative error ")
    assert config.with_suffix(".json").exists()


def test_a_lost_rank_is_one_line_and_exit_code_3(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(*_: object) -> torch.Tensor:
        raise PeerTimeout("rank 0 waited for rank 1")

    monkeypatch.setattr(MoELayer, "forward", forward)
    code, _, err = invoke(config)
    assert code == 3
    assert err.rstrip().splitlines()[-1] == "moeos: rank 0 waited for rank 1"
    assert "Traceback" not in err


def test_tokens_that_cannot_be_routed_are_named(config: Path, tmp_path: Path) -> None:
    x = torch.randn(9, 32)
    x[5, 2] = math.nan
    save_file({"x": x}, tmp_path / "x.safetensors")
    code, _, err = invoke(config, "--input", tmp_path / "x.safetensors")
    assert code == 2
    assert "token 5" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "65"], "tokens is 65; allowed: 0 to max_tokens, 64"),
        (["--tokens", "-1"], "tokens is -1"),
        (["--iterations", "0"], "iterations is 0; allowed: 1 to 10000"),
        (["--seed", "-1"], "--seed is -1"),
        (["--routing", "zip"], "--routing is 'zip'; allowed: uniform, zipf:A"),
        (["--routing", "empty-rank:1"], "empty-rank:1; ranks are 0 to 0"),
        (["--prefix", "model."], "it needs --weights"),
        (["--ignore", "shared_experts."], "it needs --weights"),
        (["--weights", "absent"], "absent: No such file or directory"),
        (["--input", "absent"], "absent: No such file or directory"),
        (["--input-text", "absent"], "absent: No such file or directory"),
        (["--input", "a", "--routing", "uniform"], "--routing and --input are given; choose one"),
        (["--json", "no/folder/out.json"], "--json is no/folder/out.json"),
        (["--backend", "gpu"], "backend is 'gpu'"),
        (["--deadline", "0"], "deadline is 0"),
        (["--ranks", "0"], "ranks is 0; allowed: 1 to 64"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(
    config: Path, arguments: list[str], message: str
) -> None:
    code, out, err = invoke(config, *arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("moeos: ")
    assert message in err


def test_a_mistake_in_the_config_is_told_with_the_file(config: Path) -> None:
    config.write_text(CONFIG.replace("hidden", "hiden"))
    code, _, err = invoke(config)
    assert code == 2
    assert f"{config}: unknown key 'hiden'; the nearest valid one is 'hidden'" in err


def test_a_layer_that_the_machine_cannot_hold_is_refused_below_the_header(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a layer was made")

    monkeypatch.setattr(host_memory, "available", lambda: 100_000)
    monkeypatch.setattr(MoELayer, "__init__", refuse)
    code, out, err = invoke(config, "--ranks", 2)
    assert code == 2
    assert out.startswith("2 ranks on the twin")
    assert err == (
        "moeos: 292 KiB of memory are needed (146 KiB of weights, 146 KiB of weights for the "
        "check), and the machine of 2 ranks has 97.66 KiB available: take a smaller layer, or "
        "leave out the check with --no-check\n"
    )


def test_json_can_go_to_stdout_which_then_has_nothing_else(config: Path) -> None:
    code, out, err = invoke(config, "--json", "-", "--backend", "twin")
    assert (code, err) == (0, "")
    assert json.loads(out)["calls"] == 3


@pytest.mark.parametrize("form", ["folder", "index", "folder-without-index"])
def test_weights_of_several_files_are_those_of_one(form: str, config: Path, tmp_path: Path) -> None:
    tensors, folder = draw_block("mlp."), tmp_path / "model"
    save_file(tensors, tmp_path / "one.safetensors")
    folder.mkdir()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, own in shards.items():
        save_file({name: tensors[name] for name in own}, folder / shard)
    index = folder / "model.safetensors.index.json"
    if form != "folder-without-index":
        places = {name: shard for shard, own in shards.items() for name in own}
        index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    made = []
    for weights in (tmp_path / "one.safetensors", index if form == "index" else folder):
        out = tmp_path / "y.safetensors"
        results(config, "--weights", weights, "--prefix", "mlp.", "--output", out)
        made.append(load_file(out)["y"])
    assert torch.equal(*made)


def test_the_output_has_a_row_for_each_row_of_the_input(config: Path, tmp_path: Path) -> None:
    x = torch.randn(61, 32)
    save_file({"x": x}, tmp_path / "x.safetensors")
    made = {}
    for tokens, calls in ((None, 1), (7, 3)):
        out = tmp_path / f"y-{calls}.safetensors"
        options = [] if tokens is None else ["--tokens", tokens]
        given = ["--input", tmp_path / "x.safetensors", "--output", out]
        results(config, "--ranks", 4, "--iterations", calls, *given, *options)
        made[calls] = load_file(out)
        assert torch.equal(made[calls]["x"], x)
    assert made[1]["y"].shape == (61, 32)
    # Equal weights, though ranks that are threads share a generator.
    assert torch.allclose(made[1]["y"], made[3]["y"], atol=1e-6)


def test_without_an_input_the_output_is_the_last_calls(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "y.safetensors"
    results(config, "--ranks", 2, "--output", out)
    found = load_file(out)
    assert found["x"].shape == found["y"].shape == (80, 32)


def test_calls_that_leave_rows_of_the_input_out_are_refused(config: Path, tmp_path: Path) -> None:
    save_file({"x": torch.randn(61, 32)}, tmp_path / "x.safetensors")
    given = ["--input", tmp_path / "x.safetensors", "--output", tmp_path / "y.safetensors"]
    code, _, err = invoke(config, *given, "--tokens", 20, "--iterations", 3)
    assert code == 2
    assert "give --iterations 4" in err


def test_an_input_of_another_dtype_says_what_it_is_converted_to(
    config: Path, tmp_path: Path
) -> None:
    for dtype, said in ((torch.float64, ", converted from float64 to float32\n"), (None, "")):
        save_file({"x": torch.randn(5, 32, dtype=dtype)}, tmp_path / "x.safetensors")
        _, out, _ = invoke(config, "--input", tmp_path / "x.safetensors")
        assert f"tokens from {tmp_path}/x.safetensors{said}" in out
        assert said or "converted" not in out
