# SPDX-License-Identifier: Apache-2.0
"""`moeos trace` on the twin: its files, its summary, its warnings, its exit codes, its guide.

`python -m tests.host.cli.test_trace FILE.npz` makes what `moeos trace --save` wrote the guide's
example: the trace, the picture and what the page shows of them.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from bench.report import report
from moeos import MoELayer, PeerTimeout
from moeos.cli import drawing
from moeos.cli.timeline import causes, chrome, files, gathering, picture
from moeos.cli.timeline.call import COMBINE, DISPATCH, NONE, ROUTE, CallTrace
from moeos.config.activations import Activation
from moeos.world.tracing import RankTrace
from tests.host.cli import commands
from tests.host.cli.timeline import chrome_format, perfetto_reader
from tests.processes import MOEOS, ROOT, forked

CONFIG = """
hidden = 32
intermediate = 48
experts = 8
top_k = 2
dtype = "float32"
max_tokens = 400

[run]
tokens = 300
"""
STAGES = ("route", "dispatch", "replicate", "product0", "product1", "combine")
CHAIN = [
    "combine",
    "product1",
    "product0",
    "dispatch",
    "route",
]  # and "replicate", of rows of peers
EXAMPLE = "trace-qwen3-30b-a3b-2048"
LOST = "select name, value from stats where severity != 'info' and value > 0"

invoke = functools.partial(commands.invoke, "trace")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "layer.toml"
    path.write_text(CONFIG)
    return path


def summary_of(config: Path, *arguments: object) -> dict[str, Any]:
    """The JSON of a trace that must work and lack nothing."""
    path = config.with_suffix(".json")
    code, _, err = invoke(config, "--json", path, "--backend", "twin", *arguments)
    assert (code, err) == (0, "")
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def test_the_file_for_viewers_has_every_part_of_every_rank(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    summary = summary_of(config, "--ranks", 2, "-o", out, "--tokens", 290)
    document = json.loads(out.read_text())
    events = chrome_format.check(document)
    parts = [event for event in events if event.get("cat") == "part"]
    for stage in summary["stages"]:
        assert sum(event["name"] == stage["kind"] for event in parts) == stage["parts"] > 0
    named = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert named == {"rank 0", "rank 1"}
    threads = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    actors = ["processor 0", "scheduler", *(f"{n} subscriber" for n in ("counts", "arrivals"))]
    assert sorted(threads) == sorted([*actors, "returns subscriber"] * 2)
    gemm = next(event for event in parts if event["name"] == "product0")
    assert set(gemm["args"]) == {"expert", "tile", "rows", "part"}
    dispatch = next(event for event in parts if event["name"] == "dispatch")
    of_chunks = {"peer", "chunk", "chunks", "first_expert", "last_expert", "rows"}
    assert set(dispatch["args"]) == of_chunks
    replicate = next(event for event in parts if event["name"] == "replicate")
    assert set(replicate["args"]) == of_chunks
    combine = next(event for event in parts if event["name"] == "combine")
    assert set(combine["args"]) == {"first_complete", "tokens"}
    flows = {event["name"] for event in events if event["ph"] == "s"}
    assert {"route → dispatch", "dispatch → replicate", "product0 → product1"} <= flows
    other = document["otherData"]
    assert other["tokens"] == 290
    assert other["config"]["hidden"] == 32
    assert other["dropped_events"] == {}


def test_perfetto_reads_all_of_the_file_for_viewers(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    summary = summary_of(config, "--ranks", 2, "-o", out)
    events = json.loads(out.read_text())["traceEvents"]

    def written(phase: str) -> list[dict[str, Any]]:
        return [event for event in events if event["ph"] == phase]

    with perfetto_reader.opened(out) as trace:
        assert trace.ask(LOST) == []
        slices = trace.ask("select name, count(*) as parts from slice group by name")
        parts = {row["name"]: row["parts"] for row in slices}
        assert sum(parts.values()) == len(written("X"))
        assert all(parts[stage["kind"]] == stage["parts"] for stage in summary["stages"])
        # Times are in µs in the file, to the ns, and in ns here.
        [span] = trace.ask("select max(ts + dur) - min(ts) as ns, sum(dur) as all_ns from slice")
        begins = [chrome_format.ns(event["ts"]) for event in written("X")]
        lengths = [chrome_format.ns(event["dur"]) for event in written("X")]
        ends = [begin + length for begin, length in zip(begins, lengths, strict=True)]
        assert span == {"ns": max(ends) - min(begins), "all_ns": sum(lengths)}
        assert trace.ask("select count(*) as arrows from flow") == [{"arrows": len(written("s"))}]
        ranks = trace.ask(
            "select process.name as rank, count(*) as threads from thread_track "
            "join thread using (utid) join process using (upid) group by 1 order by 1"
        )
        threads = sum(event["name"] == "thread_name" for event in events)
        assert ranks == [{"rank": f"rank {rank}", "threads": threads // 2} for rank in range(2)]
        levels = trace.ask(
            "select count(*) as points, count(distinct track_id) as counters from counter"
        )
        counters = {(event["pid"], event["name"]) for event in written("C")}
        assert levels == [{"points": len(written("C")), "counters": len(counters)}]


@pytest.mark.nightly
def test_perfetto_reads_all_of_a_trace_of_four_gpus(tmp_path: Path) -> None:
    saved, out = ROOT / "results" / f"{EXAMPLE}.npz", tmp_path / "trace.json"
    code, _, err = invoke("--load", saved, "-o", out)
    assert (code, err) == (0, "")
    phases = [event["ph"] for event in json.loads(out.read_text())["traceEvents"]]
    with perfetto_reader.opened(out) as trace:
        assert trace.ask(LOST) == []
        for table, phase in (("slice", "X"), ("flow", "s"), ("counter", "C")):
            assert trace.ask(f"select count(*) as n from {table}") == [{"n": phases.count(phase)}]


def test_perfetto_says_what_is_wrong_with_a_file(config: Path, tmp_path: Path) -> None:
    """So the test above can fail."""
    out = tmp_path / "trace.json"
    summary_of(config, "-o", out)
    text = out.read_text()
    out.write_text(text[:-200])
    with (
        pytest.raises(ValueError, match="JSON trace file is incomplete"),
        perfetto_reader.opened(out),
    ):
        pass
    document = json.loads(text)
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            event["dur"] += 1e6  # a second: slices of a thread no longer nest
    out.write_text(json.dumps(document))
    with perfetto_reader.opened(out) as trace:
        [lost] = trace.ask(LOST)
        assert lost["name"] == "slice_drop_overlapping_complete_event"


def test_the_summary_adds_up(config: Path) -> None:
    summary = summary_of(config, "--ranks", 2)
    assert [stage["kind"] for stage in summary["stages"]] == list(STAGES)
    for stage in summary["stages"]:
        assert 0 <= stage["first_claimed"] <= stage["last_visible"] <= summary["length_ns"]
        assert stage["work"] > 0
        assert stage["phases"]["computing"] > 0
    assert sum(stage["parts"] for stage in summary["stages"]) == sum(
        rank["parts"] for rank in summary["by_rank"]
    )
    # A processor of the twin does one part at a time.
    assert sum(stage["work"] for stage in summary["stages"]) == sum(
        rank["work"] for rank in summary["by_rank"]
    )
    assert all(0 < rank["share"] < 1 for rank in summary["by_rank"])
    kinds = [link["kind"] for link in summary["chain"]]
    assert [kind for kind in kinds if kind != "replicate"] == CHAIN


def test_the_work_of_each_stage_follows_from_the_rows(config: Path) -> None:
    """Two ranks of 290 tokens each, top 2, SwiGLU, float32."""
    summary = summary_of(config, "--ranks", 2, "--tokens", 290)
    rows = 2 * 290 * 2
    work = {kind: (done["total"], done["unit"]) for kind, done in summary["work"].items()}
    copied = [work.pop("dispatch"), work.pop("replicate")]
    cfg = summary["config"]
    hidden, intermediate = cfg["hidden"], cfg["intermediate"]
    assert work == {
        "route": (2 * 2 * 290 * cfg["experts"] * hidden, "FLOP"),
        "product0": (2 * rows * 2 * intermediate * hidden, "FLOP"),
        "product1": (2 * rows * intermediate * hidden, "FLOP"),
        "combine": (rows * hidden * 4, "B"),
    }
    # Either takes a row where it belongs.
    assert sum(total for total, _ in copied) == rows * hidden * 4
    assert [unit for _, unit in copied] == ["B", "B"]
    stages = {stage["kind"]: stage for stage in summary["stages"]}
    for kind, done in summary["work"].items():
        seconds = (stages[kind]["last_visible"] - stages[kind]["first_claimed"]) / 1e9
        assert done["rate"] == pytest.approx(done["total"] / 2 / seconds)
    # Few enough that a cache holds them: read once.
    first, second = summary["weights"]["product0"], summary["weights"]["product1"]
    assert first["once"] == first["read"] == cfg["experts"] * 2 * intermediate * hidden * 4
    assert second["once"] == second["read"] == cfg["experts"] * intermediate * hidden * 4
    assert first["asked"] >= first["once"]
    assert second["asked"] >= second["once"]
    there, back = summary["to_peers"]["dispatch"], summary["to_peers"]["product1"]
    assert there["total"] + copied[1][0] == back["total"] < rows * hidden * 4
    assert 0 < there["total"] < back["total"]
    assert summary_of(config)["to_peers"] == {}


def test_a_call_of_sliced_experts_is_traced(config: Path, tmp_path: Path) -> None:
    saved = tmp_path / "trace.npz"
    options = ("--ranks", 2, "--tokens", 200, "--parallel", "tensor")
    summary = summary_of(config, *options, "--save", saved)
    cfg = summary["config"]
    hidden, intermediate = cfg["hidden"], cfg["intermediate"]
    rows = 2 * 200 * 2  # of both ranks: each has half of every expert
    work = {kind: done["total"] for kind, done in summary["work"].items()}
    assert work["product1"] == 2 * rows * intermediate // 2 * hidden
    assert work["combine"] == (rows + 3 * 200) * hidden * 4
    assert summary["reduce"] == "fused"  # whatever was asked
    # Partial sums of the other's tokens, and the sums of its own.
    assert summary["to_peers"]["combine"]["total"] == 2 * 200 * hidden * 4
    assert [link["kind"] for link in summary["chain"]] == ["combine"]  # no event says more
    code, out, err = invoke("--load", saved)
    assert code == 0, err
    assert "combine" in out


def test_a_call_whose_sums_are_added_up_behind_the_kernel_sends_none_in_it(
    config: Path, tmp_path: Path
) -> None:
    path = tmp_path / "summary.json"
    options = ("--tokens", "60", "--parallel", "tensor", "--reduce", "after", "--backend", "twin")
    ended = forked(2, MOEOS, "trace", str(config), *options, "--json", str(path))
    assert (ended.returncode, ended.stderr) == (0, "")
    summary = json.loads(path.read_text())
    assert summary["reduce"] == "after"
    rows = 2 * 60 * 2  # of both ranks: each has half of every expert
    assert summary["work"]["combine"]["total"] == rows * summary["config"]["hidden"] * 4
    assert "combine" not in summary["to_peers"]


def test_a_call_of_sharded_tokens_is_traced(config: Path) -> None:
    summary = summary_of(config, "--ranks", 2, "--tokens", 60, "--parallel", "sharded_tokens")
    cfg = summary["config"]
    rows = 2 * 2 * 60 * 2  # a token has a row for each slice
    work = {kind: done["total"] for kind, done in summary["work"].items()}
    assert work["product1"] == 2 * rows * cfg["intermediate"] // 2 * cfg["hidden"]
    assert summary["chain"][0]["kind"] == "combine"


@pytest.mark.parametrize(("parallel", "pairs"), [("tensor", 1), ("sharded_tokens", 2)])
def test_a_call_of_groups_of_ranks_is_traced(
    parallel: str, pairs: int, config: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "trace.npz"
    options = ("--tokens", 60, "--parallel", parallel, "--tensor-ranks", 2)
    summary = summary_of(config, "--ranks", 4, *options, "--save", saved)
    cfg = summary["config"]
    hidden = cfg["hidden"]
    rows = pairs * 4 * 60 * 2
    work = {kind: done["total"] for kind, done in summary["work"].items()}
    assert work["product1"] == 2 * rows * cfg["intermediate"] // 2 * hidden
    assert summary["to_peers"]["product1"]["total"] > 0
    sums = 60 * 3 if parallel == "tensor" else 0  # of a group: partial ones, and whole ones
    assert work["combine"] == (rows + 2 * sums) * hidden * 4
    if parallel == "tensor":  # of each rank, half of its tokens' partial sums, and of its sums
        assert summary["to_peers"]["combine"]["total"] == 4 * 60 * hidden * 4
    code, out, err = invoke("--load", saved)
    assert code == 0, err
    assert "combine" in out


@pytest.mark.parametrize("activation", get_args(Activation))
def test_the_work_of_a_layer_of_any_activation_and_router_is_told(
    config: Path, activation: str
) -> None:
    rules = f'activation = "{activation}"\nrouter_dtype = "float32"\n'
    config.write_text(CONFIG.replace("[run]", f"{rules}[run]"))
    work = summary_of(config, "--tokens", 40)["work"]
    halves = 2 if activation in ("swiglu", "swigluoai", "geglu_tanh") else 1
    assert work["product0"]["total"] == 2 * 40 * 2 * halves * 48 * 32
    assert work["route"]["total"] == 2 * 40 * 8 * 32


@pytest.mark.parametrize(("of_results", "result"), [("", 128 * 4), ("result_format", 256)])
def test_rows_of_codes_are_counted_as_they_are_sent(
    of_results: str, result: int, config: Path, tmp_path: Path
) -> None:
    codes = 'weight_format = "fp8_tensor"\nactivation_format = "fp8_group128"\n'
    codes += f'{of_results} = "fp8_group128"\n' if of_results else ""
    sizes = CONFIG.replace("hidden = 32", "hidden = 128").replace("= 48", "= 64")
    config.write_text(sizes.replace("[run]", f"{codes}[run]"))
    out = tmp_path / "trace.json"
    summary = summary_of(config, "--ranks", 2, "--tokens", 290, "-o", out)
    rows, sent = 2 * 290 * 2, 128 + 4 + 12
    work, to_peers = summary["work"], summary["to_peers"]
    assert work["dispatch"]["total"] + work["replicate"]["total"] == rows * sent
    assert work["combine"]["total"] == rows * result
    assert to_peers["dispatch"]["total"] % sent == 0 < to_peers["dispatch"]["total"]
    assert to_peers["product1"]["total"] % result == 0 < to_peers["product1"]["total"]
    levels = [
        event["args"]["bytes"]
        for event in chrome_format.check(json.loads(out.read_text()))
        if event["name"] == "dispatched bytes to peers in flight"
    ]
    assert max(levels) > 0
    assert all(level % sent == 0 for level in levels)


def test_bytes_in_flight_rise_and_fall_to_nothing(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    summary = summary_of(config, "--ranks", 2, "-o", out)
    events = chrome_format.check(json.loads(out.read_text()))
    sent = 0
    for process in (1, 2):
        levels = [
            event["args"]["bytes"]
            for event in events
            if event["name"] == "dispatched bytes to peers in flight" and event["pid"] == process
        ]
        assert levels[-1] == 0 < max(levels)
        assert min(levels) == 0
        sent += sum(max(0, b - a) for a, b in zip([0, *levels], levels, strict=False))
    assert 0 < sent <= summary["to_peers"]["dispatch"]["total"]


def test_the_terminal_gets_tables_and_the_chain(config: Path) -> None:
    code, out, err = invoke(config, "--ranks", 2, "--backend", "twin")
    assert (code, err) == (0, "")
    assert re.match(r"layer, 8 experts, 2 ranks on the twin, .*, 300 tokens a rank: .* first", out)
    for words in (
        *("a part's wait, mean", "rank 1", "at work", "dispatch of chunk", "of block"),
        *("those complete from place", "or those of another tile that may hold its rows"),
    ):
        assert words in out
    chain = out.split("what the last Combine waited for, backwards:\n")[1]
    kinds = re.findall(r"^ *[\d.]+ \S+  rank \d's (\w+) of", chain, re.MULTILINE)
    assert [kind for kind in kinds if kind != "replicate"] == CHAIN
    assert " replicate " in out.split("\n\n")[1]
    code, out, err = invoke(config, "--backend", "twin")
    assert (code, err) == (0, "")
    assert "replicate" not in out  # nothing comes from anywhere else
    code, out, err = invoke(config, "--no-summary", "--backend", "twin")
    assert (code, out, err) == (0, "", "")


def test_events_without_room_are_told_with_the_room_that_they_need(
    config: Path, tmp_path: Path
) -> None:
    out = tmp_path / "trace.json"
    summary = tmp_path / "summary.json"
    arguments = (config, "--ranks", 2, "--backend", "twin", "-o", out, "--json", summary)
    code, text, err = invoke(*arguments, "--events", 20)
    assert code == 0
    lines = err.splitlines()
    pattern = (
        r"moeos: the trace of rank (\d) lacks (\d+) events? for .* \(.*(processor 0) (\d+).*\)"
    )
    found = [re.match(pattern + r"; give --events (\d+)$", line) for line in lines]
    assert [match.group(1) for match in found if match] == ["0", "1"]
    lost = json.loads(out.read_text())["otherData"]["dropped_events"]
    for match in found:
        assert match is not None
        actors = lost[f"rank {match.group(1)}"]
        assert sum(actors.values()) == int(match.group(2))
        assert actors[match.group(3)] == int(match.group(4)) > 0
    assert "events are missing" in text
    assert "dispatch" not in json.loads(summary.read_text())["work"]
    assert "what the last Combine waited for" not in text
    chrome_format.check(json.loads(out.read_text()))
    room = max(int(match.group(5)) for match in found if match)
    code, _, err = invoke(*arguments, "--events", 4 * room)  # the OS actors' steps vary by timing
    assert (code, err) == (0, "")


def test_a_saved_call_can_be_read_again(config: Path, tmp_path: Path) -> None:
    saved, first, again = (tmp_path / name for name in ("call.npz", "first.json", "again.json"))
    summary = summary_of(config, "--ranks", 2, "--save", saved, "--out", first)
    code, out, err = invoke("--load", saved, "--out", again, "--json", tmp_path / "again-sum.json")
    assert (code, err) == (0, "")
    assert "layer, 8 experts, 2 ranks on the twin" in out
    loaded = json.loads((tmp_path / "again-sum.json").read_text())
    assert loaded["stages"] == summary["stages"]
    assert loaded["chain"] == summary["chain"]
    documents = [json.loads(path.read_text()) for path in (first, again)]
    assert documents[0]["traceEvents"] == documents[1]["traceEvents"]
    assert documents[0]["otherData"].items() <= documents[1]["otherData"].items()


@pytest.mark.parametrize("tokens", [300, 0])
def test_the_picture_is_a_png(config: Path, tmp_path: Path, tokens: int) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws")
    summary_of(config, "--tokens", tokens, "--png", tmp_path / "call.png")
    assert (tmp_path / "call.png").read_bytes().startswith(b"\x89PNG")


def test_a_call_without_tokens_has_no_parts_and_can_be_shown(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "call.json"
    summary = summary_of(config, "--ranks", 2, "--tokens", 0, "--out", out)
    assert summary["chain"] == []
    assert json.loads(out.read_text())["traceEvents"]  # the OS blocks' steps


def test_a_missing_matplotlib_is_told_before_anything_runs(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(drawing.importlib, "import_module", missing)
    monkeypatch.setattr(MoELayer, "forward", None)
    code, out, err = invoke(config, "--backend", "twin", "--png", tmp_path / "call.png")
    assert (code, out) == (3, "")
    assert err == "moeos: matplotlib, which draws plots, is missing: pip install 'moeos[plots]'\n"


def test_the_traced_call_is_the_last_of_all(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = MoELayer.forward, []

    def forward(layer: MoELayer, *arguments: Any) -> Any:
        calls.append(arguments[0].clone())
        return right(layer, *arguments)

    monkeypatch.setattr(MoELayer, "forward", forward)
    assert summary_of(config, "--calls", 2)["calls_before"] == 2
    assert len(calls) == 3
    assert calls[0].equal(calls[2])


def test_a_number_of_experts_can_be_chosen(config: Path) -> None:
    summary = summary_of(config, "--experts", 4)
    assert summary["config"]["experts"] == 4
    assert ", 4 experts, " in summary["what"]


def test_a_pattern_of_routing_can_be_chosen(config: Path) -> None:
    summary = summary_of(config, "--ranks", 2, "--routing", "one-expert")
    assert summary["routing"] == "one-expert"
    assert summary["by_rank"][1]["parts"] < summary["by_rank"][0]["parts"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "neither is given of CONFIG, a layer to run, and --load, a trace to read"),
        (["{config}", "--load", "a.npz"], "both are given of CONFIG, a layer to run, and --load"),
        (["--load", "absent.npz"], "absent.npz: No such file or directory"),
        (["--load", "{config}"], "layer.toml is no trace that `moeos trace --save` wrote"),
        (["absent.toml"], "absent.toml: No such file or directory"),
        (["{config}", "--tokens", "401"], "tokens is 401; allowed: 0 to max_tokens, 400"),
        (["{config}", "--events", "0"], "--events is 0; allowed: 1 to 65536"),
        (["{config}", "--events", "65537"], "--events is 65537; allowed: 1 to 65536"),
        (["{config}", "--calls", "-1"], "--calls is -1; allowed: 0 to 10000"),
        (
            ["{config}", "--backend", "twin", "--cold"],
            "--cold empties a GPU's L2 cache, which back",
        ),
        (["{config}", "--seed", "-1"], "--seed is -1"),
        (["{config}", "--ranks", "0"], "ranks is 0; allowed: 1 to 64"),
        (["{config}", "--experts", "1"], "top_k is 2"),
        (["{config}", "--routing", "zip"], "--routing is 'zip'; allowed: uniform, zipf:A"),
        (["{config}", "--backend", "gpu"], "backend is 'gpu'"),
        (["{config}", "--deadline", "0"], "deadline is 0"),
        *[
            (["{config}", option, "no/folder/file"], f"{option} is no/folder/file; it must name")
            for option in ("--out", "--png", "--save", "--json")
        ],
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(
    config: Path, arguments: list[str], message: str
) -> None:
    code, out, err = invoke(*(argument.format(config=config) for argument in arguments))
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("moeos: ")
    assert message in err


def test_a_lost_rank_is_one_line_and_exit_code_3(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(*_: object) -> None:
        raise PeerTimeout("rank 0 waited for rank 1")

    monkeypatch.setattr(MoELayer, "forward", forward)
    assert invoke(config, "--backend", "twin") == (3, "", "moeos: rank 0 waited for rank 1\n")


def test_virtual_ranks_are_refused_under_a_launcher(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    code, _, err = invoke(config, "--ranks", 2)
    assert code == 2
    assert "--ranks is given, but a launcher has started several ranks" in err


def test_a_trace_that_is_too_large_for_one_exchange_travels_in_pieces(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, taken = MoELayer.trace, {}

    def trace(layer: MoELayer) -> RankTrace:
        own = right(layer)
        taken[own.rank] = own
        return own

    monkeypatch.setattr(MoELayer, "trace", trace)
    monkeypatch.setattr(gathering, "_PIECE_BYTES", 777)
    saved = tmp_path / "call.npz"
    summary = summary_of(config, "--ranks", 2, "--routing", "one-expert", "--save", saved)
    by_rank = summary["by_rank"]
    assert by_rank[0]["parts"] > by_rank[1]["parts"]  # so they have different numbers of pieces
    for arrived in files.load(saved)[0]:
        sent = taken[arrived.rank]
        assert [e.tolist() for e in arrived.events] == [e.tolist() for e in sent.events]
        assert arrived.received.tolist() == sent.received.tolist()


def test_of_several_processes_rank_0_has_the_traces_of_all(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    ended = forked(2, MOEOS, "trace", str(config), "-o", str(out), "--backend", "twin")
    assert (ended.returncode, ended.stderr) == (0, "")
    events = chrome_format.check(json.loads(out.read_text()))
    processes = {event["pid"] for event in events if event.get("cat") == "part"}
    assert len(processes) == 2
    assert ended.stdout.count("first event to the last") == 1


def test_the_guides_commands_run_and_print_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every `moeos` command of docs/tracing.md, where it would be typed: in the repository."""
    pytest.importorskip("matplotlib", reason="matplotlib draws")
    page = (ROOT / "docs" / "tracing.md").read_text()
    for name in ("configs", "results"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    lines = [line for block in fenced(page, "sh") for line in block.splitlines()]
    assert len(lines) >= 5
    for line in lines:
        moeos, *words = shlex.split(line, comments=True)
        assert moeos == "moeos"
        code, out, err = commands.invoke(*words)
        assert (code, err) == (0, ""), line
    [shown] = fenced(page, "text")
    assert shown == out  # of the last command


def fenced(page: str, language: str) -> list[str]:
    """The blocks of a language in a page."""
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def example(root: Path) -> str:
    """What the guide shows of the trace in results/ of a checkout."""
    file = root / "results" / f"{EXAMPLE}.npz"
    ranks, about = files.load(file)
    code, shown, err = invoke("--load", file)
    assert (code, err) == (0, "")
    call = CallTrace.of(ranks)
    picture_of = f"{call.processors} processors: tasks by colour over {call.length / 1000:.0f} µs"
    converted = f"\nThis trace was {about['converted']}.\n" if "converted" in about else ""
    return (
        f"For instance {about['what']}; the trace lies in `results/`:\n\n"
        f"```sh\nmoeos trace --load results/{EXAMPLE}.npz --png trace.png\n```\n\n"
        f"![{picture_of}](../results/plots/{EXAMPLE}.png)\n\n"
        f"```text\n{shown}```\n{converted}"
    )


def replace_example(saved: Path, root: Path) -> None:
    """Makes a saved trace the example of the guide of a checkout."""
    folder = root / "results"
    if saved.resolve() != (folder / f"{EXAMPLE}.npz").resolve():
        shutil.copyfile(saved, folder / f"{EXAMPLE}.npz")
    drawn = folder / "plots" / f"{EXAMPLE}.png"
    code, _, err = invoke("--load", saved, "--png", drawn, "--no-summary")
    assert (code, err) == (0, "")
    page = root / "docs" / "tracing.md"
    page.write_text(report.between_markers(page.read_text(), EXAMPLE, example(root)))


def example_of(root: Path) -> tuple[CallTrace, dict[str, Any]]:
    ranks, about = files.load(root / "results" / f"{EXAMPLE}.npz")
    return CallTrace.of(ranks), about


def check_example(root: Path) -> None:
    """Fails unless page and picture are of the trace in results/."""
    image = pytest.importorskip("PIL.Image", reason="matplotlib, which draws, brings pillow")
    page = (root / "docs" / "tracing.md").read_text()
    assert report.between_markers(page, EXAMPLE, example(root)) == page
    drawn = image.open(root / "results" / "plots" / f"{EXAMPLE}.png")
    assert drawn.info["Description"] == picture.digest(example_of(root)[0])


def test_the_guides_example_is_of_the_trace_in_results() -> None:
    check_example(ROOT)
    _, about = example_of(ROOT)
    assert re.match(
        "qwen3-30b-a3b, 128 experts, 4 ranks on .*NVIDIA H200.*, 2048 tokens", about["what"]
    )


def test_the_guides_example_can_be_replaced(config: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws")
    root, saved = tmp_path / "checkout", tmp_path / "call.npz"
    (root / "results" / "plots").mkdir(parents=True)
    (root / "docs").mkdir()
    shutil.copyfile(ROOT / "docs" / "tracing.md", root / "docs" / "tracing.md")
    summary_of(config, "--save", saved)
    replace_example(saved, root)
    check_example(root)
    assert "layer, 8 experts, 1 rank on the twin" in (root / "docs" / "tracing.md").read_text()


def test_a_trace_of_a_gpu_is_a_file_that_viewers_can_show() -> None:
    """With parts that overlap on a processor."""
    call, _ = example_of(ROOT)
    found = causes.find(call)
    chrome_format.check(chrome.document(call, found, {}))
    assert (found.certain == (call.parts["kind"] != COMBINE)).all()
    assert causes.lead(call, found) == {}
    waited = found.part != NONE
    assert (waited == (call.parts["kind"] != ROUTE)).all()
    late = waited & (call.parts["claimed"] < found.since(call.parts))
    assert (call.parts["kind"][late] == DISPATCH).all()  # posted while the last Route part ends


if __name__ == "__main__":
    replace_example(Path(sys.argv[1]), ROOT)
