# SPDX-License-Identifier: Apache-2.0
"""`moeos plan`: every config of the repository has a plan, quickly, and bad input a line."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from moeos import MoEConfig, MoELayer, World
from moeos.cli.shared import machine
from moeos.compile.kernel_shape import KernelShape
from moeos.engines.shared_heap import SharedHeap
from moeos.engines.twin.engine import sizes_of
from moeos.partition import rates
from moeos.partition.slicing import Slicing
from moeos.world import virtual
from moeos.world.world import TwinOptions
from tests.host.cli import commands
from tests.processes import ROOT

CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
QWEN = ROOT / "configs" / "qwen3-30b-a3b.toml"


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


def test_what_a_call_keeps_for_its_backward_is_planned_both_ways(tmp_path: Path) -> None:
    options = ("--ranks", 1, "--tokens", 8192, "--json", tmp_path / "plan.json")
    code, out, _ = invoke(QWEN, *options)
    assert code == 0
    routing, row = 8192 * 8 * 8, 2 * 768 * 2
    saved = {"nothing": routing, "preactivation": routing + 8192 * 8 * row}
    assert json.loads((tmp_path / "plan.json").read_text())["saved_bytes"] == saved
    assert re.search(r"save='nothing' +│ +512 KiB", out)
    assert re.search(r"save='preactivation' +│ +192\.5 MiB", out)
    coded = tmp_path / "coded.toml"
    coded.write_text('weight_format = "fp8_tensor"\n' + QWEN.read_text())
    code, out, _ = invoke(coded, *options)
    assert code == 0
    assert json.loads((tmp_path / "plan.json").read_text())["saved_bytes"] == {}
    assert "save=" not in out


@pytest.mark.parametrize(
    ("ranks", "held"),
    [
        (3, "3 ranks with at most 43 of 128 experts (2 with 43, 1 with 42)"),
        (7, "7 ranks with at most 19 of 128 experts (6 with 19, 1 with 14)"),
        (12, "12 ranks with at most 11 of 128 experts (11 with 11, 1 with 7)"),
        (100, "100 ranks with at most 2 of 128 experts (64 with 2, 36 with 0)"),
        (128, "128 ranks with 1 of 128 experts each"),
        (512, "512 ranks with at most 1 of 128 experts (128 with 1, 384 with 0)"),
    ],
)
def test_ranks_that_do_not_divide_the_experts_have_a_plan(ranks: int, held: str) -> None:
    code, out, err = invoke(QWEN, "--ranks", ranks, "--tokens", 64)
    assert (code, err) == (0, "")
    assert held in " ".join(out.split())


def test_experts_that_are_sliced_have_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    code, out, err = invoke(QWEN, "--ranks", 4, "--parallel", "tensor", "--json", path)
    assert (code, err) == (0, "")
    assert "4 ranks with a slice of each of 128 experts" in " ".join(out.split())
    assert "sums of tokens" in out
    plan = json.loads(path.read_text())
    cfg = MoEConfig.from_toml(QWEN)
    sliced = KernelShape(
        cfg=Slicing(4).cut(cfg), world_size=1, processors=131, slicing=Slicing(4)
    ).sizes
    assert plan["memory"]["heap"] == SharedHeap().with_shape(sliced).size
    assert sum(plan["heap"].values()) == plan["memory"]["heap"]
    assert plan["heap"]["sums"] == 2 * cfg.max_tokens * cfg.hidden * 2
    invoke(QWEN, "--ranks", 4, "--json", path)
    whole = json.loads(path.read_text())
    assert plan["weight_bytes"] == whole["weight_bytes"]
    assert 4 * plan["call"]["expert_flops"] == whole["call"]["expert_flops"]  # of 4 ranks' tokens
    # As a reduce-scatter and an all-gather.
    assert plan["call"]["combine_bytes"] == 2 * cfg.max_tokens * 3 // 4 * cfg.hidden * 2


def test_a_plan_of_slices_says_how_a_call_is_computed_and_why() -> None:
    options = ("--ranks", 4, "--parallel", "tensor", "--tokens")
    few, many = (planned(QWEN, *options, tokens) for tokens in (8, 4096))
    assert (few["layout"], many["layout"]) == ("gathered", "expert_major_persistent")
    for plan in (few, many):
        assert plan["reduce"] == "fused"
        costs = plan["seconds_by_reduce"]
        assert plan["reduce"] == min(costs, key=costs.get)
        assert min(costs.values()) >= plan["floor_seconds"]["compute"]
    costs = few["seconds_by_layout"]
    assert few["layout"] == min(costs, key=costs.get)
    forced = ("--layout", "expert_major_persistent", "--reduce", "after")
    plan = planned(QWEN, *options, 8, *forced)
    assert (plan["layout"], plan["reduce"]) == forced[1::2]
    assert plan["seconds_by_reduce"] == few["seconds_by_reduce"]
    # What an all-reduce sends is what the kernel would, but for flags.
    assert plan["call"]["combine_bytes"] == few["call"]["combine_bytes"]
    assert plan["call"]["flag_bytes"] == 0 < few["call"]["flag_bytes"]
    assert plan["call"]["tasks"]["combine"] < few["call"]["tasks"]["combine"]
    assert "reduce after; the costs' model" in invoke(QWEN, *options, 8, *forced)[1]
    plan = planned(QWEN, *options, 4096, "--layout", "token_major")
    costs = plan["seconds_by_layout"]
    assert plan["layout"] == "token_major"
    assert costs["token_major"] > costs["gathered"]


def test_a_plan_tells_what_rows_by_index_cost_as_they_were_measured() -> None:
    costs = {
        ranks: planned(QWEN, "--ranks", ranks, "--tokens", 8192)["seconds_by_layout"]
        for ranks in (1, 4)
    }
    # One rank alone: gathering was measured to take a few percent of 1.16 ms more (I is 768).
    assert 0 < costs[1]["gathered"] - costs[1]["expert_major_persistent"] < 60e-6
    assert costs[1]["gathered"] == pytest.approx(217e-6, rel=0.05)
    assert costs[4]["gathered"] < costs[1]["gathered"] / 3  # own rows alone are gathered
    out = invoke(QWEN, "--ranks", 2, "--parallel", "tensor", "--tokens", 8192)[1]
    assert "layout expert_major_persistent; the costs' model" in out
    assert "--layout gathered always does" in " ".join(out.split())


def test_a_plan_of_whole_experts_says_where_own_rows_are_read() -> None:
    options = ("--ranks", 4, "--tokens", 4096)
    assert planned(QWEN, *options)["layout"] == "expert_major_persistent"
    plan = planned(QWEN, *options, "--layout", "gathered")
    assert (plan["layout"], plan["parallel"], plan["tensor_ranks"]) == ("gathered", "expert", 1)
    assert "seconds_by_reduce" not in plan
    assert "layout gathered; the costs' model" in invoke(QWEN, *options, "--layout", "gathered")[1]


def test_a_plan_refuses_a_layout_that_the_layer_cannot_have(tmp_path: Path) -> None:
    coded = tmp_path / "coded.toml"
    codes = 'weight_format = "fp8_channel"\nactivation_format = "fp8_group128"\n'
    coded.write_text(codes + QWEN.read_text())
    for parallel in ("expert", "tensor"):
        options = ("--ranks", 2, "--parallel", parallel)
        code, _, err = invoke(coded, *options, "--layout", "gathered")
        assert code == 2
        assert "not its row of x as it stands" in " ".join(err.split())
        assert list(planned(coded, *options)["seconds_by_layout"]) == ["expert_major_persistent"]
    code, _, err = invoke(QWEN, "--layout", "sorted")
    assert code == 2
    assert "token_major or gathered" in " ".join(err.split())
    code, _, err = invoke(QWEN, "--ranks", 2, "--layout", "token_major")
    assert code == 2
    assert "give --parallel tensor without --tensor-ranks, or --layout gathered" in " ".join(
        err.split()
    )


def test_a_plan_of_slices_with_tokens_of_each_ranks_own_has_no_sums() -> None:
    code, out, err = invoke(QWEN, "--ranks", 4, "--parallel", "sharded_tokens")
    assert (code, err) == (0, "")
    assert "returned to peers" in out
    assert "tokens a rank and even routing" in out


@pytest.mark.parametrize(
    ("ranks", "slices", "held"),
    [
        (8, 2, "4 groups of 2 ranks with slices of 32 of 128 experts each"),
        (12, 4, "3 groups of 4 ranks with slices of at most 43 of 128 experts (2 with 43, 1 with"),
    ],
)
def test_groups_of_ranks_have_a_plan(ranks: int, slices: int, held: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    options = ("--ranks", ranks, "--parallel", "sharded_tokens", "--tensor-ranks", slices)
    code, out, err = invoke(QWEN, *options, "--json", path)
    assert (code, err) == (0, "")
    assert held in " ".join(out.split())
    plan = json.loads(path.read_text())
    assert (plan["parallel"], plan["tensor_ranks"]) == ("sharded_tokens", slices)
    cfg = MoEConfig.from_toml(QWEN)
    slicing = Slicing(slices, apart=True)
    shape = KernelShape(
        cfg=slicing.cut(cfg),
        world_size=ranks,
        processors=131,
        places=slicing.placement(cfg.experts, ranks).most,
        slicing=slicing,
    )
    assert plan["memory"]["heap"] == SharedHeap().with_shape(shape.sizes).size


def test_slices_with_tokens_of_each_ranks_own_have_peers_over_a_network() -> None:
    options = ("--ranks-per-node", 4, "--parallel", "sharded_tokens", "--tensor-ranks", 4)
    code, out, err = invoke(QWEN, *options)
    assert (code, err) == (0, "")
    assert "over the network" in out


def test_a_plan_of_slices_is_that_of_one_node() -> None:
    code, _, err = invoke(QWEN, "--ranks-per-node", 4, "--parallel", "tensor")
    assert code == 2
    assert "--parallel tensor has no peers over a network" in err


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
            [ROOT / "configs" / "mixtral-8x7b.toml", "--ranks", "65536"],
            "moeos: the world's size is 65536; it must be at most 65535\n",
        ),
        (
            [ROOT / "configs" / "demo.toml", "--tokens", "513"],
            "moeos: tokens is 513; allowed: 0 to max_tokens, 512\n",
        ),
        ([QWEN, "--layers", "0"], "moeos: --layers is 0; it must be 1 to 65536\n"),
        ([QWEN, "--ranks-per-node", "0"], "moeos: --ranks-per-node is 0; it must be at least 1\n"),
        (
            [QWEN, "--ranks", "64", "--ranks-per-node", "5"],
            "moeos: --ranks-per-node is 5, which does not divide --ranks 64: all nodes have "
            "equally many\n",
        ),
        (
            [QWEN, "--network", "50"],
            "moeos: --network is 50, but all 8 ranks are on one node: give --ranks-per-node\n",
        ),
        (
            [QWEN, "--ranks-per-node", "4", "--network", "0"],
            "moeos: --network is 0; it must be GB/s, above 0\n",
        ),
    ],
    ids=[
        *("no-file", "ranks", "tokens", "layers", "ranks-per-node"),
        *("uneven nodes", "one node", "network"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[object], message: str) -> None:
    assert invoke(*arguments) == (2, "", message)


def planned(*arguments: object) -> dict[str, Any]:
    """What `--json -` prints, which is one object and nothing else."""
    code, out, err = invoke(*arguments, "--json", "-")
    assert (code, err) == (0, "")
    plan: dict[str, Any] = json.loads(out)
    return plan


def test_48_layers_take_the_memory_of_one_but_for_weights_and_the_total_is_of_one_rank() -> None:
    one, many = (planned(QWEN, "--layers", layers) for layers in (1, 48))
    for plan in (one, many):
        assert plan["total_without_weights"] == sum(plan["memory"].values())
        assert plan["total"] == plan["total_without_weights"] + plan["total_weights"]
    without = many["total_without_weights"]
    assert one["total_without_weights"] < without <= 1.05 * one["total_without_weights"]
    assert many["memory"]["records"] == 48 * one["memory"]["records"]
    assert many["total_weights"] == 48 * one["weight_bytes"]


def test_memory_is_that_of_the_gpus_kernel() -> None:
    sizes = KernelShape(cfg=MoEConfig.from_toml(QWEN), world_size=8, processors=131).sizes
    plan = planned(QWEN)
    assert plan["backend"] == "cuda"
    heap = plan["memory"].pop("heap")
    assert sizes.heap_bytes <= heap <= 1.01 * sizes.heap_bytes  # with room for others' words
    words = plan["heap"].pop("words")
    assert sizes.words_bytes < words <= heap - sum(plan["heap"].values())
    rows, places, row_bytes = 8192 * 8, 8192 * 8 // 8 * 2 + 128, 2048 * 2
    assert plan["heap"] == {
        "cells": 8 * places * row_bytes,
        "results": rows * row_bytes,
        "staged": 0,
        "sums": 0,
    }
    assert plan["memory"] == {
        "queues": sizes.control_bytes + sizes.tables_bytes,
        "between": sizes.intermediate_bytes,
        "records": sizes.records_bytes,
    }


def test_what_is_planned_for_the_twin_is_what_a_world_has_then(tmp_path: Path) -> None:
    path = tmp_path / "layer.toml"
    text = (ROOT / "configs" / "demo.toml").read_text()
    path.write_text(text.replace('"bfloat16"', '"float32"'))  # which a GPU does not have
    cfg = MoEConfig.from_toml(path)

    def make(world: World) -> dict[str, int]:
        layers = [MoELayer(cfg, world, init=False) for _ in range(3)]
        assert len(layers) == 3
        return world.memory()

    made = virtual.run(make, ranks=2, twin=TwinOptions(processors=1))
    plan = planned(path, "--ranks", 2, "--layers", 3)
    assert made == [plan["memory"]] * 2


def test_memory_of_a_layer_that_the_gpu_lacks_is_the_twins_and_says_why() -> None:
    path = ROOT / "configs" / "twin-bench.toml"
    assert planned(path, "--ranks", 4)["backend"] == "twin"
    assert "no GPU: dtype is torch.float32" in invoke(path, "--ranks", 4)[1]


def test_rows_for_ranks_of_other_nodes_take_no_memory_of_their_own() -> None:
    near, far = (planned(QWEN, "--ranks-per-node", ranks) for ranks in (8, 4))
    assert near["memory"] == planned(QWEN)["memory"]
    assert far["memory"]["heap"] <= 1.01 * near["memory"]["heap"]  # flags are wider
    assert far["memory"]["queues"] > near["memory"]["queues"]  # which have requests


@pytest.mark.parametrize("ranks", [1, 3, 64, 512])
def test_the_parts_of_a_heap_are_all_of_it_whatever_the_world(ranks: int, tmp_path: Path) -> None:
    """Where results are longer than rows of codes, and so are staged in places of their own."""
    path = tmp_path / "layer.toml"
    text = QWEN.read_text().replace("max_tokens = 8192", "max_tokens = 512")
    path.write_text(text + 'weight_format = "fp8_block128"\nactivation_format = "fp8_group128"\n')
    near, far = (planned(path, "--ranks", ranks, "--ranks-per-node", n) for n in (ranks, 1))
    for plan in (near, far):
        assert sum(plan["heap"].values()) == plan["memory"]["heap"]
    assert near["heap"]["staged"] == 0
    assert (far["heap"]["staged"] > 0) == (ranks > 1)
    line = "results until they are put"
    assert line not in invoke(path, "--ranks", ranks)[1]
    assert (line in invoke(path, "--ranks", ranks, "--ranks-per-node", 1)[1]) == (ranks > 1)


def test_bytes_to_other_nodes_have_no_bound_of_nvlink() -> None:
    nodes = ("--ranks", 64, "--ranks-per-node", 8)
    plan = planned(QWEN, *nodes, "--network", 50)
    call = plan["call"]
    far = sum(call["bytes_by_peer"][8:])
    assert plan["network_bytes"] == far > sum(call["bytes_by_peer"][:8])
    assert plan["floor_seconds"]["network"] == pytest.approx(far / 50e9)
    assert "network" not in planned(QWEN, *nodes)["floor_seconds"]
    out = invoke(QWEN, *nodes)[1]
    assert re.search(r"over the network +│ +\d.*iB, 88.9 %", out)
    assert re.search(r"over the network +│ +│ +not known │ +--network GB/s", out)
    assert "bytes to peers" not in out
    out = invoke(QWEN, *nodes, "--network", 50)[1]
    assert re.search(r"over the network +│ +[\d.]+ ms │ +50 GB/s", out)
    assert "network" not in invoke(QWEN)[1]


def test_a_plan_says_which_gpu_its_layers_fit_into() -> None:
    layers = 560  # whose weights alone fill an H100
    assert invoke(QWEN, "--layers", layers)[1].count(": fits,") == 1
    fits = {gpu["name"]: gpu["fits"] for gpu in planned(QWEN, "--layers", layers)["gpus"]}
    assert (fits["H100"], fits["H200"]) == (False, True)


def test_a_plan_says_whose_rates_it_uses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert planned(QWEN)["rates"] == {"here": None, "of": "NVIDIA H200"}
    monkeypatch.setattr(machine, "gpus", lambda: ["NVIDIA Unheard Of"])
    assert planned(QWEN)["rates"] == {"here": "NVIDIA Unheard Of", "of": "NVIDIA H200"}
    out = invoke(QWEN)[1]
    assert "NVIDIA Unheard Of, of which no rates are known: those of an NVIDIA H200" in out
    rates.keep("NVIDIA Unheard Of", {"link_bytes": 1e11})
    assert planned(QWEN)["rates"]["of"] == "NVIDIA Unheard Of"
    out = invoke(QWEN)[1]
    assert "no rates are known" not in out
    assert "with an NVIDIA Unheard Of a rank" in out
    assert "100 GB/s" in out


# --- the verdict --------------------------------------------------------------------------------


def test_the_first_line_is_the_verdict_and_what_does_not_fit_ends_with_1() -> None:
    code, out, _ = invoke(QWEN)
    assert code == 0
    assert re.match(r"fits: a rank needs [\d.]+ GiB of 139.8 GiB, H200\n", out)
    code, out, err = invoke(QWEN, "--ranks", 1, "--layers", 480)
    assert (code, err) == (1, "")
    assert re.match(r"does not fit: a rank needs [\d.]+ GiB of 139.8 GiB, H200; plan more", out)
    assert "H200: does not fit, " in out  # and all else is there


def test_a_verdict_is_of_the_smallest_gpu_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu_memory", lambda: {"large": 10**12, "small": 10**8})
    code, out, _ = invoke(QWEN)
    assert code == 1
    assert re.match(r"does not fit: a rank needs [\d.]+ GiB of 95\.37 MiB, here: small; ", out)


def test_a_verdict_of_what_no_gpu_has_is_of_the_twin() -> None:
    code, out, _ = invoke(ROOT / "configs" / "twin-bench.toml")
    assert code == 0
    assert re.match(r"runs on the twin alone: a rank needs [\d.]+ MiB; no GPU: dtype is", out)
