# SPDX-License-Identifier: Apache-2.0
"""Fences of the device OS: all that actors share is ordered by them, and one that is taken away is
noticed.

The twin's polls and publishes are relaxed, as the GPU's, and fences order them. ThreadSanitizer
does not model fences; the explorer's witness of order (test_order.cpp) does.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

import pytest

from tests.native.test_native import (
    COMPILER,
    DEVICE_OS,
    EXPLORE_SOURCES,
    OPTIMISED,
    ROOT,
    TESTS,
    Flavour,
    compile_all,
    execute,
    gemm_sources,
    in_one_file,
    run,
)

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
    pytest.mark.timeout(600),
]

WATCHED = Flavour(("-O1", "-g1", "-fsanitize=thread", "-Wno-tsan"), 0, {})
"""Calls functions of ThreadSanitizer's names, which the witness has."""
WRAPPED = ("memcpy", "memmove", "memset", "mmap", "munmap")

SOUND_RUNS, RUNS = 100, 300
"""Seeds, each in three scenarios and two strategies."""


@dataclasses.dataclass(frozen=True)
class Missing:
    """An order that a copy of the sources lacks.

    Attributes:
        file, text, replacement: the text occurs once in the file.
        at_once: looked for whenever tests run, not only at night.
    """

    file: str
    text: str
    replacement: str = ""
    at_once: bool = False


def fence(name: str, kind: str) -> str:
    return f"P::template {name}_fence<Scope::{kind}>();"


RELAY = fence("relay", "device")
ACQUIRE = fence("acquire", "device")
PUBLISH = fence("publish", "device")
RETURNS, COURIER = "runtime/returns_subscriber.hpp", "runtime/courier.hpp"
ARRIVALS, PROCESSOR = "runtime/arrivals_subscriber.hpp", "runtime/processor.hpp"
SENDER, SCHEDULER = "runtime/sender.hpp", "runtime/scheduler.hpp"

MISSING = {
    # Behind polls.
    "rows that a returns subscriber finds in the routing map": Missing(
        RETURNS, f"{ACQUIRE}\n    return true;", "return true;"
    ),
    "the routing map, for the Combine of a call planned whole": Missing(
        RETURNS, f"{RELAY}\n    if (index_ == 0)", f"{PUBLISH}\n    if (index_ == 0)"
    ),
    "the routing map, for the Combine of tokens without rows": Missing(
        RETURNS, f"{RELAY}\n    hand_out(", f"{PUBLISH}\n    hand_out("
    ),
    "results, for a token that is complete": Missing(RETURNS, fence("acquire", "system")),
    "descriptors that the scheduler hands on": Missing(SCHEDULER, RELAY, PUBLISH),
    "rows of a chunk whose flag is up": Missing(
        "runtime/chunk_flags.hpp", fence("acquire", "system")
    ),
    "staged rows, for whoever puts them": Missing(SENDER, RELAY, PUBLISH),
    "the routing map, for tokens that are spread": Missing("runtime/spread.hpp", ACQUIRE),
    "inputs that a processor has waited for": Missing(PROCESSOR, fence("acquire", "system")),
    "the descriptor of a part, and its inputs": Missing(
        PROCESSOR, f"{ACQUIRE}\n        word", "word"
    ),
    "shared results, for a sum": Missing(PROCESSOR, f"{ACQUIRE}  // pairs", "// pairs"),
    "rows that landed, for whom they are promised to": Missing(COURIER, RELAY, PUBLISH),
    "rows that landed, promised to an earlier ticket's holder": Missing(
        COURIER, f"{ACQUIRE}\n    if (!find(", "if (!find("
    ),
    "the list of Dispatch": Missing(COURIER, f"{ACQUIRE}\n    parts_", "parts_"),
    # Before words that are published.
    "the routing map, passed on to processors of a call planned whole": Missing(
        RETURNS, f"{RELAY}\n    if (index_ == 0)", f"{ACQUIRE}\n    if (index_ == 0)"
    ),
    "the routing map, passed on for tokens without rows": Missing(
        RETURNS, f"{RELAY}\n    hand_out(", f"{ACQUIRE}\n    hand_out("
    ),
    "complete tokens": Missing(RETURNS, PUBLISH),
    "descriptors of a call planned whole": Missing(
        ARRIVALS, f"{PUBLISH}\n    if (numbers)", "if (numbers)"
    ),
    "descriptors of new tiles": Missing(ARRIVALS, f"{PUBLISH}\n    while", "while"),
    "descriptors and inputs, passed on by the scheduler": Missing(SCHEDULER, RELAY, ACQUIRE),
    "rows for other ranks": Missing("runtime/packet.hpp", fence("publish", "system"), at_once=True),
    "rows for this rank": Missing("runtime/packet.hpp", PUBLISH),
    "promises, passed on to a later ticket's holder": Missing(COURIER, RELAY, ACQUIRE),
    # Words that carry their own order.
    "a tile between its GEMMs": Missing(
        "runtime/mailbox.hpp", "store_release<Scope::device>", "store_relaxed<Scope::device>"
    ),
    "a tile between its GEMMs, which are awaited": Missing(
        PROCESSOR,
        "add_release<Scope::device>(&rank_.memory.gemm0_parts_done",
        "count_relaxed<Scope::device>(&rank_.memory.gemm0_parts_done",
    ),
    "how many rows tokens have": Missing(
        PROCESSOR,
        "add_release<Scope::device>(&state_.token_rows_known",
        "count_relaxed<Scope::device>(&state_.token_rows_known",
    ),
    "shared results": Missing(
        PROCESSOR,
        "store_release<Scope::device>(rank_.memory.shared_results_here",
        "store_relaxed<Scope::device>(rank_.memory.shared_results_here",
    ),
    "the list of landed chunks": Missing(
        "runtime/landings_subscriber.hpp",
        "add_release<Scope::device>",
        "count_relaxed<Scope::device>",
    ),
    "a chunk made whole": Missing(
        COURIER, "store_release<Scope::device>", "store_relaxed<Scope::device>"
    ),
    "counts, decoded": Missing(
        "runtime/counts_subscriber.hpp",
        "store_release<Scope::block>(&rank_.os->counts_known",
        "store_relaxed<Scope::block>(&rank_.os->counts_known",
    ),
    "counts, for whoever watches flags": Missing(
        "runtime/chunk_flags.hpp", "load_acquire<Scope::block>", "load_relaxed<Scope::block>"
    ),
    "counts, for a call planned whole": Missing(
        ARRIVALS, "load_acquire<Scope::block>", "load_relaxed<Scope::block>"
    ),
    "the routing map": Missing(
        "runtime/routing_finish.hpp",
        "store_release<Scope::device>(&rank.memory.call(call.epoch).routed.value, parts + 1)",
        "store_relaxed<Scope::device>(&rank.memory.call(call.epoch).routed.value, parts + 1)",
    ),
    "parts of a whole": Missing(
        "runtime/team.hpp", "add_acquire_release<Scope::device>", "add_relaxed<Scope::device>"
    ),
}


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The explorer with its witness, but without the device OS: object files."""
    folder = tmp_path_factory.mktemp("watched")
    apart = {DEVICE_OS, TESTS / "test_explore.cpp"}
    around = folder / "around.cpp"
    around.write_text(in_one_file(one for one in EXPLORE_SOURCES if one not in apart))
    witness = compile_all(OPTIMISED, [TESTS / "test_order.cpp"], ROOT, folder)
    return [*witness, *compile_all(WATCHED, [around, *gemm_sources()], ROOT, folder)]


def program(surroundings: list[Path], root: Path, folder: Path) -> Path:
    instrumented = compile_all(WATCHED, [DEVICE_OS, TESTS / "ordered_couriers.cpp"], root, folder)
    built = folder / "ordered"
    wraps = [f"-Wl,--wrap={name}" for name in WRAPPED]
    linked = run([str(COMPILER), "-no-pie", *wraps, *instrumented, *surroundings, "-o", built])
    assert linked.returncode == 0, linked.stderr
    return built


def test_everything_that_actors_share_is_ordered(surroundings: list[Path], tmp_path: Path) -> None:
    done = execute(WATCHED, program(surroundings, ROOT, tmp_path), 1, SOUND_RUNS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "everything is ordered" in done.stdout


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if missing.at_once else pytest.mark.nightly)
        for name, missing in MISSING.items()
    ],
)
def test_an_order_that_is_missing_is_noticed(
    name: str, surroundings: list[Path], tmp_path: Path
) -> None:
    missing = MISSING[name]
    for folder in ("runtime", "kernels", "tests/native"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    broken = tmp_path / missing.file
    text = broken.read_text()
    assert text.count(missing.text) == 1, f"{missing.file} has changed: say where its order is now"
    broken.write_text(text.replace(missing.text, missing.replacement))
    done = execute(WATCHED, program(surroundings, tmp_path, tmp_path / "objects"), 1, RUNS)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search("nothing orders|gives a wrong result", done.stdout)
