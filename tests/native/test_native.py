# SPDX-License-Identifier: Apache-2.0
"""The twin without Python: random worlds under sanitizers, and the matrix product with and without.

g++ builds tests/native/*.cpp with the twin's sources; nothing but moeos's own code is in these
programs, so a sanitizer sees all of it and reports nothing else.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import pytest
import torch

ROOT = Path(__file__).parents[2]
TWIN = Path("kernels/twin")
TESTS = Path("tests/native")

COMPILER = shutil.which("g++")
pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
    pytest.mark.timeout(600),
]

INSTRUCTION_SETS = {  # as in CMakeLists.txt
    "gemm_avx2.cpp": ["-mavx2", "-mfma"],
    "gemm_avx512.cpp": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"],
}


@dataclasses.dataclass(frozen=True)
class Flavour:
    """A way to build the programs.

    Attributes:
        options: for the compiler; those that begin with -fsanitize also for the linker.
        worlds: how many random worlds run in a few seconds.
        environment: of the programs, for the sanitizers.
        for_products: further options for what multiplies matrices.
    """

    options: tuple[str, ...]
    worlds: int
    environment: dict[str, str]
    for_products: tuple[str, ...] = ()


PLAIN = Flavour(("-O1", "-DMOEOS_DEBUG_CHECKS"), 0, {})
"""For programs that run for a moment."""
OPTIMISED = Flavour(("-O2", "-DMOEOS_DEBUG_CHECKS"), 0, {})
"""For the matrix product, which is worth nothing slow."""

FLAVOURS = {
    "thread": Flavour(
        ("-O1", "-g1", "-fsanitize=thread", "-DMOEOS_WORDS_CARRY_ORDER"),
        16,
        {"TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1"},
    ),
    "address": Flavour(
        (
            "-Og",  # compiled in two thirds of the time of -O1
            "-g1",
            "-DMOEOS_DEBUG_CHECKS",
            "-fsanitize=address,undefined",
            "-fno-sanitize-recover=all",
        ),
        16,
        {"ASAN_OPTIONS": "detect_stack_use_after_return=1", "UBSAN_OPTIONS": "print_stacktrace=1"},
        for_products=("-O1",),  # all others run for a moment
    ),
}


def run(command: Sequence[str | Path], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*map(str, command)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def compile_all(flavour: Flavour, sources: Sequence[Path], root: Path, to: Path) -> list[Path]:
    """The object files of sources below `root`, which is also where their includes are found."""
    to.mkdir(parents=True, exist_ok=True)

    def compile_one(source: Path) -> Path:
        output = to / f"{source.stem}.o"
        options = [
            "-std=c++20",
            "-Werror=unused-result",
            *flavour.options,
            *INSTRUCTION_SETS.get(source.name, []),
        ]
        options += flavour.for_products if "gemm" in source.stem else ()
        done = run([str(COMPILER), *options, f"-I{root}", "-c", root / source, "-o", output])
        assert done.returncode == 0, done.stderr
        return output

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return [*pool.map(compile_one, sources)]


def link(flavour: Flavour, objects: Sequence[Path], program: Path) -> Path:
    sanitizers = [option for option in flavour.options if option.startswith("-fsanitize")]
    done = run([str(COMPILER), *sanitizers, *objects, "-pthread", "-o", program])
    assert done.returncode == 0, done.stderr
    return program


def execute(
    flavour: Flavour, program: Path, *arguments: object
) -> subprocess.CompletedProcess[str]:
    """Runs a program; without address randomisation, which ThreadSanitizer's shadow memory of older
    compilers does not bear on kernels that randomise many bits."""
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []
    if fixed and run([*fixed, "true"]).returncode != 0:
        fixed = []  # a container may forbid it
    return run([*fixed, program, *map(str, arguments)], **flavour.environment)


def gemm_sources() -> list[Path]:
    on_x86 = platform.machine().lower() in ("x86_64", "amd64")
    sources = sorted(path.relative_to(ROOT) for path in (ROOT / TWIN).glob("gemm*.cpp"))
    return [source for source in sources if on_x86 or source.name not in INSTRUCTION_SETS]


@dataclasses.dataclass(frozen=True)
class Built:
    """What was built in one flavour."""

    flavour: Flavour
    virtual_ranks: Path
    damaged_words: Path
    calls: Path
    workspaces: Path
    gemm: Path
    gemm_objects: list[Path]


TWIN_SOURCES = [TWIN / "forward.cpp", TWIN / "crew.cpp", TWIN / "explore" / "random_world.cpp"]
RANK_SOURCES = [*TWIN_SOURCES, TESTS / "test_virtual_ranks.cpp"]
Build = Callable[[str], Built]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Builds a flavour, by name, once."""

    @functools.cache
    def build_once(name: str) -> Built:
        flavour, to = FLAVOURS[name], tmp_path_factory.mktemp(name)
        alone = [
            TESTS / f"test_{name}.cpp" for name in ("workspaces", "gemm", "damaged_words", "calls")
        ]
        sources = [*RANK_SOURCES, *alone, *gemm_sources()]  # the slowest first
        made = dict(zip(sources, compile_all(flavour, sources, ROOT, to), strict=True))
        gemm = [made[source] for source in gemm_sources()]
        twin = [*[made[source] for source in TWIN_SOURCES], *gemm]

        def program(name: str, *objects: Path) -> Path:
            test = made[TESTS / f"test_{name}.cpp"]
            return link(flavour, [test, *objects], to / name)

        return Built(
            flavour,
            program("virtual_ranks", *twin),
            program("damaged_words", *twin),
            program("calls", *twin),
            program("workspaces", *twin),
            program("gemm", *gemm),
            gemm,
        )

    return build_once


def assert_clean(done: subprocess.CompletedProcess[str]) -> None:
    report = done.stdout[-4000:] + done.stderr[-8000:]
    assert done.returncode == 0, report
    assert "Sanitizer" not in report
    assert "runtime error" not in report


@pytest.mark.parametrize("name", ["thread", pytest.param("address", marks=pytest.mark.nightly)])
def test_random_worlds_compute_the_right_result(name: str, build: Build) -> None:
    built = build(name)
    worlds = built.flavour.worlds
    done = execute(built.flavour, built.virtual_ranks, 1, worlds)
    assert_clean(done)
    assert f"{worlds} worlds, 0 failed" in done.stdout


@pytest.mark.parametrize("name", FLAVOURS)
def test_random_layers_of_one_workspace_compute_the_right_results(name: str, build: Build) -> None:
    built = build(name)
    workspaces = built.flavour.worlds
    done = execute(built.flavour, built.workspaces, 1, workspaces)
    assert_clean(done)
    assert f"{workspaces} workspaces, 0 failed" in done.stdout


@pytest.mark.parametrize("name", FLAVOURS)
def test_damaged_words_in_a_heap_are_errors(name: str, build: Build) -> None:
    built = build(name)
    assert_clean(execute(built.flavour, built.damaged_words))


@pytest.mark.parametrize("name", FLAVOURS)
def test_a_rank_makes_one_call_after_the_other_and_not_for_ever(name: str, build: Build) -> None:
    built = build(name)
    assert_clean(execute(built.flavour, built.calls))


def test_matrix_product_alone_under_a_sanitizer(build: Build) -> None:
    assert_products_are_right(execute(FLAVOURS["address"], build("address").gemm))


def test_matrix_product_alone_as_it_is_used(gemm_objects: list[Path], tmp_path: Path) -> None:
    objects = compile_all(OPTIMISED, [TESTS / "test_gemm.cpp"], ROOT, tmp_path)
    program = link(OPTIMISED, [*objects, *gemm_objects], tmp_path / "gemm")
    assert_products_are_right(execute(OPTIMISED, program))


def assert_products_are_right(done: subprocess.CompletedProcess[str]) -> None:
    assert_clean(done)
    assert "portable passed" in done.stdout


def assert_program_passes(source: str, folder: Path, flavour: Flavour | None = None) -> None:
    """Of one source file, which includes what it is about."""
    flavour = flavour or FLAVOURS["address"]
    objects = compile_all(flavour, [TESTS / source], ROOT, folder)
    assert_clean(execute(flavour, link(flavour, objects, folder / "program")))


SENDER_SOURCES = [TESTS / "test_sender.cpp"]
EXPLORE_SOURCES = [
    TWIN / "forward.cpp",
    TWIN / "crew.cpp",
    TWIN / "explore" / "explore.cpp",
    TWIN / "explore" / "random_world.cpp",
    TWIN / "explore" / "hostile_nic.cpp",
    TWIN / "explore" / "schedule.cpp",
    TESTS / "test_explore.cpp",
]


def test_a_sender_keeps_every_window_and_the_earliest_failure(tmp_path: Path) -> None:
    flavour = FLAVOURS["address"]
    objects = compile_all(flavour, SENDER_SOURCES, ROOT, tmp_path)
    assert_clean(execute(flavour, link(flavour, objects, tmp_path / "sender")))


def test_no_tile_is_loaded_in_more_boxes_than_a_warp_has_lanes_for(tmp_path: Path) -> None:
    assert_program_passes("test_geometry.cpp", tmp_path, PLAIN)


def test_rows_become_tiles_expert_by_expert_or_as_they_arrive(tmp_path: Path) -> None:
    assert_program_passes("test_tile_plan.cpp", tmp_path)


def test_a_rank_alone_plans_every_part_once(tmp_path: Path) -> None:
    assert_program_passes("test_lone_plan.cpp", tmp_path)


def test_a_call_is_planned_whole_in_an_order_without_circles(tmp_path: Path) -> None:
    assert_program_passes("test_arrivals.cpp", tmp_path)


def test_tiles_of_few_rows_are_the_same_whoever_makes_them(tmp_path: Path) -> None:
    assert_program_passes("test_few_plan.cpp", tmp_path)


def test_parts_that_everyone_knows_are_all_there_once(tmp_path: Path) -> None:
    assert_program_passes("test_known_parts.cpp", tmp_path)


def test_tiles_are_handed_out_in_order_and_the_rest_in_halves(tmp_path: Path) -> None:
    assert_program_passes("test_scheduler.cpp", tmp_path)


def test_searches_find_every_answer_at_every_size(tmp_path: Path) -> None:
    objects = compile_all(PLAIN, [TESTS / "test_base.cpp"], ROOT, tmp_path)
    assert_clean(execute(PLAIN, link(PLAIN, objects, tmp_path / "base")))


def test_codes_of_weights_are_the_numbers_that_pytorch_reads(tmp_path: Path) -> None:
    flavour = FLAVOURS["address"]
    objects = compile_all(flavour, [TESTS / "test_formats.cpp"], ROOT, tmp_path)
    done = execute(flavour, link(flavour, objects, tmp_path / "formats"))
    assert_clean(done)
    numbers: dict[str, list[int]] = {}
    codes_from: dict[int, int] = {}
    for line in done.stdout.splitlines():
        kind, code, bits = line.split()
        if kind == "to_e4m3":
            codes_from[int(code)] = int(bits)
            continue
        assert int(code) == len(numbers.setdefault(kind, []))
        numbers[kind].append(int(bits))
    assert_codes_of_numbers(codes_from)
    for kind, ours in numbers.items():
        if hasattr(torch, kind):  # older versions lack one of them
            codes = torch.arange(256, dtype=torch.uint8).view(getattr(torch, kind))
            theirs = codes.to(torch.float32)
            bits = theirs.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
            is_nan = theirs.isnan()
            assert torch.tensor(ours)[~is_nan].equal(bits[~is_nan])
            assert all(number & 0x7FFFFFFF > 0x7F800000 for number in torch.tensor(ours)[is_nan])


def assert_codes_of_numbers(codes_from: dict[int, int]) -> None:
    """Of all numbers of 19 bits, which are all of float16 and of bfloat16. `codes_from`: the code
    of each, by the upper bits of fp32, where it is not that of the number below.
    """
    starts = torch.tensor([*codes_from, 1 << 19])
    assert len(codes_from) > 2 * 126
    ours = torch.tensor([*codes_from.values()]).repeat_interleave(starts.diff())
    every = (torch.arange(1 << 19) << 13).to(torch.int32).view(torch.float32)
    theirs = every.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).long()
    is_nan = every.isnan()
    assert torch.equal(ours[~is_nan], theirs[~is_nan])
    assert bool((ours[is_nan] == 0x7F).all())


@pytest.fixture(scope="module")
def gemm_objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The matrix product, for programs that nothing sanitizes."""
    return compile_all(OPTIMISED, gemm_sources(), ROOT, tmp_path_factory.mktemp("gemm"))


# --- that these tests can fail ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Fault:
    """A defect for a copy of the sources, and what its report says.

    Attributes:
        program: that must notice it: `THREADED_RUNS` random worlds under ThreadSanitizer, the
            sender alone, or the explorer, within `RUNS` seeds from `seed` on.
        file, text, replacement: the text occurs once in the file.
        report: a pattern in what the program prints, or "" where it ends by a trap.
    """

    program: Literal["threads", "sender", "explorer"]
    file: str
    text: str
    replacement: str
    report: str
    seed: int = 1


RUNS, THREADED_RUNS = 1000, 200

IN_EVERY_RUN = (
    "a release that is relaxed",
    "shares of a whole that are counted before they are there",
    "a later failure that replaces an earlier one",
    "a part that does not wait for its inputs",
    "credits that processors have looked at, and nobody clears",
)
"""Faults of each program and of most files. A compilation each: the others are for the night."""

FAULTS = {
    "a release that is relaxed": Fault(
        "threads",
        "runtime/platform/twin/platform.hpp",
        "access(word).store(value, std::memory_order_release)",
        "access(word).store(value, std::memory_order_relaxed)",
        "ThreadSanitizer: data race",
    ),
    "a flag that overtakes its rows": Fault(
        "threads",
        "runtime/platform/twin/platform.hpp",
        "store_release<Scope::system>(word, value);\n    } else",
        "store_relaxed<Scope::system>(word, value);\n    } else",
        "ThreadSanitizer: data race",
    ),
    "a chunk made whole whose flag overtakes its rows": Fault(
        "threads",
        "runtime/courier.hpp",
        "P::template store_release<Scope::device>(\n        rank_.memory.replicated_flag(",
        "P::template store_relaxed<Scope::device>(\n        rank_.memory.replicated_flag(",
        "ThreadSanitizer: data race",
    ),
    "shares of a whole that are counted before they are there": Fault(
        "threads",
        "runtime/team.hpp",
        "add_acquire_release<Scope::device>(done, share)",
        "add_relaxed<Scope::device>(done, share)",
        "ThreadSanitizer: data race",
    ),
    "a window that nobody looks at": Fault(
        "sender",
        "runtime/sender.hpp",
        "while (before - echoed(peer) + rows <= rank_.geometry().window())",
        "while (true)",
        "two chunks are put in a window",
    ),
    "a later failure that replaces an earlier one": Fault(
        "sender",
        "runtime/watchdog.hpp",
        "while (seen == 0 || (seen >> 32 > word >> 32 && word >> 32 != 0))",
        "while (seen != word)",
        "the failure of the earlier call is raised",
    ),
    "a host that gives up and hides why": Fault(
        "sender",
        "runtime/watchdog.hpp",
        " && word >> 32 != 0))",
        "))",
        "a host that gives up replaces nothing",
    ),
    "a failure of which only the first sender tells": Fault(
        "sender",
        "runtime/sender.hpp",
        "if (world_ > 0 && P::lane() == 0) {\n      put_own_failure(",
        "if (world_ > 0 && index_ == 0 && P::lane() == 0) {\n      put_own_failure(",
        "the last sender tells of a failure",
    ),
    "a record that is put again while it is read": Fault(
        "sender",
        "runtime/watchdog.hpp",
        "if (!P::template compare_exchange_release<Scope::device>(claimed, 0U, 1U)) {\n    return;"
        "\n  }\n  const u64 record",
        "(void)claimed;\n  const u64 record",
        "a record is put once",
    ),
    "tiles that do not wait for a chunk to be made whole": Fault(
        "explorer",
        "runtime/arrivals_subscriber.hpp",
        "whole_chunk_flags(rank_, source, rows)",
        "whole_chunk_flags(rank_, source, 0)",
        "gives a wrong result|trusted",
    ),
    "a token that is to come with a pair that is dropped": Fault(
        "explorer",
        "runtime/routing_map.hpp",
        "geometry.owner_of(its) == place.peer && sent(other)",
        "geometry.owner_of(its) == place.peer",
        "",
    ),
    "a row that is said to come from a later one": Fault(
        "explorer",
        "runtime/routing_map.hpp",
        "if (its < expert && geometry",
        "if (its > expert && geometry",
        "without a fault",
    ),
    "a sum that does not wait for the shared experts": Fault(
        "explorer",
        "runtime/lone_warp.hpp",
        "!processor.await_shared(rank.memory, dispatch)",
        "false",
        "gives a wrong result",
    ),
    "tiles of tokens whose counter nobody clears": Fault(
        "explorer",
        "runtime/processor.hpp",
        "P::template store_relaxed<Scope::device>(&rank_.memory.gemm0_parts_done[task.tile], 0U);\n"
        "      note<P>",
        "note<P>",
        "without a fault|gives a wrong result|fails after a reset",
    ),
    "rows of two experts at one place": Fault(
        "explorer",
        "runtime/layout.hpp",
        "local_expert * geometry().capacity + slot",
        "local_expert + slot",
        "gives a wrong result",
    ),
    "a row written into another rank's cell": Fault(
        "explorer",
        "runtime/packet.hpp",
        "direct + rank.layout.write_row(rank.rank, peer, rank.rank,",
        "direct + rank.layout.write_row(rank.rank, peer, peer,",
        "",
    ),
    "sums of echoes, of which an older one may come last": Fault(
        "explorer",
        "runtime/sender.hpp",
        "add_word(peer, rank_.layout.echoed(rank_.rank), landed - *told_of);",
        "put_word(peer, rank_.layout.echoed(rank_.rank), landed);",
        "without a fault|another fails after a reset",
        seed=251,
    ),
    "a flag that is put before all of its rows": Fault(
        "explorer",
        "runtime/packet.hpp",
        "rank.platform.order_puts();  // the flag speaks for the runs before, too",
        "",
        "gives a wrong result",
    ),
    "a chunk that is awaited and forgotten": Fault(
        "explorer",
        "runtime/returns_subscriber.hpp",
        "kept += P::count(all_kept);",
        "",
        "without a fault",
    ),
    "a rank that is blamed for waiting": Fault(
        "explorer",
        "runtime/counts_subscriber.hpp",
        "late > 1 ? 4 : 2",
        "0",
        "and names rank",
    ),
    "a part that does not wait for its inputs": Fault(
        "explorer",
        "runtime/inputs.hpp",
        "missing = missing || seen[i] != wanted_[i];",
        "",
        "gives a wrong result",
    ),
    "a rank alone that plans by another call's counts": Fault(
        "explorer",
        "runtime/lone_plan.hpp",
        "missing || epoch_of(words[i]) != call_.epoch || rows",
        "missing || rows",
        "without a fault|another fails after a reset",
        seed=501,
    ),
    "a rank alone that plans by another call's choices": Fault(
        "explorer",
        "runtime/lone_plan.hpp",
        "missing || epoch_of(words[i]) != call_.epoch ||\n                (expert",
        "missing ||\n                (expert",
        "",
    ),
    "a tile in place whose rows are other tokens'": Fault(
        "explorer",
        "runtime/lone_plan.hpp",
        "tokens |= chose && row < task.rows ? as_row(token, row) : 0;",
        "tokens |= chose && row < task.rows ? as_row(token / 2, row) : 0;",
        "gives a wrong result",
    ),
    "tokens that sent no row are looked for before routing is over": Fault(
        "explorer",
        "runtime/processor.hpp",
        "of_unsent  ? is_routed()",
        "of_unsent  ? true",
        "gives a wrong result|without a fault",
    ),
    "tiles that were made as rows came, and are handed out with the rest": Fault(
        "explorer",
        "runtime/arrivals_subscriber.hpp",
        "hand_out_waves(posted_);",
        "hand_out_waves(0);",
        "",
    ),
    "a chunk that brought all of its rows, and is taken for one that is made whole": Fault(
        "explorer",
        "runtime/chunk_flags.hpp",
        "rank.leaves_out(source, rows, chunk)",
        "rank.sends_once(source, rows)",
        "fails with kind",
    ),
    "second GEMMs handed out before those that they wait for": Fault(
        "explorer",
        "runtime/arrivals_subscriber.hpp",
        "hand_out_wave(TaskKind::gemm0, first);\n      if (first >= begin + lag) {\n"
        "        hand_out_wave(TaskKind::gemm1, first - lag);",
        "hand_out_wave(TaskKind::gemm1, first);\n      if (first >= begin + lag) {\n"
        "        hand_out_wave(TaskKind::gemm0, first - lag);",
        "without a fault",
    ),
    "a tile whose rows have landed, and are not copied to where it wants them": Fault(
        "explorer",
        "runtime/inputs.hpp",
        ": rank.memory.rows_received(segment.source);",
        ": 0;",
        "gives a wrong result",
    ),
    "results that go where those of a call before went": Fault(
        "explorer",
        "runtime/packet.hpp",
        "if (its == epoch && base <= rank.geometry().result_rows()) {",
        "if (base <= rank.geometry().result_rows()) {",
        "gives a wrong result",
    ),
    "results of two peers in one place": Fault(
        "explorer",
        "runtime/routing_finish.hpp",
        "placed += P::broadcast(ends, P::kLanes - 1);",
        "",
        "gives a wrong result",
    ),
    "a tile of few rows that begins where the expert before does": Fault(
        "explorer",
        "runtime/few_plan.hpp",
        "before.rows[two] += rows_from_two(i, two);",
        "",
        "gives a wrong result|without a fault",
    ),
    "a part of few rows that is foreseen for another one": Fault(
        "explorer",
        "runtime/processor.hpp",
        "told ? word.number() : number,",
        "told ? word.number() : number + 1,",
        "",
    ),
    "a count that is looked for again, for ever, when somebody has overwritten it": Fault(
        "explorer",
        "runtime/processor.hpp",
        "counts == Counts::missing && turn + 1 < 2 * rank_.geometry().world",
        "counts == Counts::missing",
        "does not end",
        seed=251,
    ),
    "a part of few rows that is another one than was foreseen": Fault(
        "explorer",
        "runtime/processor.hpp",
        "word.number() == number && foreseen != kNone",
        "foreseen != kNone",
        "",
    ),
    "credits that processors have looked at, and nobody clears": Fault(
        "explorer",
        "runtime/returns_subscriber.hpp",
        "handed_out_whole_ && i < awaited_; i +=",
        "handed_out_whole_ && i + 1 < awaited_; i +=",
        "",
    ),
    "a rank without tokens that does not tell its peers so": Fault(
        "explorer",
        "runtime/routing_finish.hpp",
        "send_count(rank, call, peer, local, 0);",
        "",
        "",
    ),
    "places without an expert of which nobody tells a count": Fault(
        "explorer",
        "runtime/routing_finish.hpp",
        "const bool told = first + P::lane() < geometry.expert_places();",
        "const bool told = there;",
        "without a fault",
    ),
    "a piece of a chunk that is taken for all of it": Fault(
        "explorer",
        "runtime/task.hpp",
        "const bool whole = word.number() % 2 != 0;",
        "const bool whole = true;",
        "",
    ),
    "a descriptor that nobody looks at": Fault(
        "explorer",
        "runtime/task.hpp",
        "return all == kWhole;",
        "return all != 0 || all == 0;",
        "",
    ),
}


OF_PROGRAMS = {"threads": RANK_SOURCES, "explorer": EXPLORE_SOURCES, "sender": SENDER_SOURCES}
DEVICE_OS = TWIN / "forward.cpp"


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """The explorer without the device OS that it explores, which is most of a compilation.

    Attributes:
        compiled: the object file.
        files: that it is made of, below the repository: with one of them broken, it is another.
    """

    compiled: Path
    files: frozenset[str]


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Surroundings:
    folder = tmp_path_factory.mktemp("explorer")
    source = folder / "surroundings.cpp"
    source.write_text(in_one_file(one for one in EXPLORE_SOURCES if one != DEVICE_OS))
    [compiled] = compile_all(PLAIN, [source], ROOT, folder)
    listed = run([str(COMPILER), "-std=c++20", *PLAIN.options, f"-I{ROOT}", "-MM", source])
    assert listed.returncode == 0, listed.stderr
    found = (Path(word) for word in listed.stdout.replace("\\\n", " ").split()[1:])
    files = {str(path.relative_to(ROOT)) for path in found if path.is_relative_to(ROOT)}
    return Surroundings(compiled, frozenset(files))


def in_one_file(sources: Iterable[Path]) -> str:
    """A source file of several: compiled in half of the time."""
    return "".join(f'#include "{source}"\n' for source in sources)


TWO_RETURNS_SUBSCRIBERS = (
    (
        "runtime/platform/twin/platform.hpp",
        "kReturnsSubscribers = 1",
        "kReturnsSubscribers = 2",
    ),
    ("runtime/os.hpp", "P::kSenders == 1 && P::kReturnsSubscribers == 1", "P::kSenders == 1"),
    (
        "kernels/twin/explore/random_world.cpp",
        "split_os = draw(random, 0, 1) == 1",
        "split_os = draw(random, 0, 1) <= 1",
    ),
)
"""Changes that give a rank of the explorer two warps which count returned rows, as a GPU has four.
Each is then a thread of its own."""


def explore_two_returns_subscribers(
    folder: Path, products: Sequence[Path], seed: int, runs: int, *more: tuple[str, str, str]
) -> subprocess.CompletedProcess[str]:
    for name in ("runtime", "kernels", "tests/native"):
        shutil.copytree(ROOT / name, folder / name)
    for file, text, replacement in (*TWO_RETURNS_SUBSCRIBERS, *more):
        before = (folder / file).read_text()
        assert before.count(text) == 1, f"{file} has changed: say anew what there is two of"
        (folder / file).write_text(before.replace(text, replacement))
    (folder / "program.cpp").write_text(in_one_file(EXPLORE_SOURCES))
    objects = compile_all(PLAIN, [Path("program.cpp")], folder, folder / "objects")
    program = link(PLAIN, [*objects, *products], folder / "explorer")
    return execute(PLAIN, program, seed, runs)


def test_two_warps_that_count_returned_rows_are_right_in_any_order(
    gemm_objects: list[Path], tmp_path: Path
) -> None:
    assert_clean(explore_two_returns_subscribers(tmp_path, gemm_objects, 1, RUNS // 10))


@pytest.mark.nightly
def test_a_call_that_ends_before_both_warps_have_listed_their_chunks_is_noticed(
    gemm_objects: list[Path], tmp_path: Path
) -> None:
    done = explore_two_returns_subscribers(
        tmp_path,
        gemm_objects,
        1001,
        RUNS,
        ("runtime/scheduler.hpp", "listed == P::kReturnsSubscribers ||", "listed >= 1 ||"),
    )
    assert done.returncode == 1
    assert "seed" in done.stdout


@pytest.mark.parametrize(
    "name",
    [
        name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.nightly)
        for name in FAULTS
    ],
)
def test_a_fault_in_the_protocol_is_noticed(
    name: str,
    build: Build,
    gemm_objects: list[Path],
    surroundings: Surroundings,
    tmp_path: Path,
) -> None:
    fault = FAULTS[name]
    flavour = FLAVOURS["thread"] if fault.program == "threads" else PLAIN
    sound = build("thread").gemm_objects if fault.program == "threads" else gemm_objects
    sources = OF_PROGRAMS[fault.program]
    if fault.program == "explorer" and fault.file not in surroundings.files:
        sources, sound = [DEVICE_OS], [surroundings.compiled, *sound]
    for folder in ("runtime", "kernels", "tests/native"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    broken = tmp_path / fault.file
    text = broken.read_text()
    assert text.count(fault.text) == 1, f"{fault.file} has changed: choose another fault"
    broken.write_text(text.replace(fault.text, fault.replacement))
    (tmp_path / "program.cpp").write_text(in_one_file(sources))
    objects = compile_all(flavour, [Path("program.cpp")], tmp_path, tmp_path / "objects")
    program = link(flavour, [*objects, *sound], tmp_path / "broken")
    done = execute(
        flavour, program, fault.seed, RUNS if fault.program == "explorer" else THREADED_RUNS
    )
    assert done.returncode not in (0, 2)
    assert re.search(fault.report, done.stdout + done.stderr)
