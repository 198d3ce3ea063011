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
from typing import Any, Literal

import pytest
import torch

from tests.compiled import keep
from tests.nightly import all_but

ROOT = Path(__file__).parents[2]
TWIN = Path("kernels/twin")
TESTS = Path("tests/native")

INCLUDED = ("runtime", "kernels", "tests/native")

COMPILER = shutil.which("g++")


def source_of(name: str) -> Path:
    """The source of a program; of a program that tests a room, it lies in that room's folder."""
    [found] = (ROOT / TESTS).rglob(name)
    return found.relative_to(ROOT)


pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
    pytest.mark.timeout(1200),
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
        environment: of the programs, for the sanitizers.
        for_products: further options for what multiplies matrices.
    """

    options: tuple[str, ...]
    environment: dict[str, str]
    for_products: tuple[str, ...] = ()


PLAIN = Flavour(("-O1", "-DMOEOS_DEBUG_CHECKS"), {})
"""For programs that run for a moment."""
PLANTED = Flavour((*PLAIN.options, "-DMOEOS_PLANTS"), {})
"""With all faults of the source (runtime/words/planted.hpp), of which a run plants one, or none."""
OPTIMISED = Flavour(("-O2", "-DMOEOS_DEBUG_CHECKS"), {})
"""For the matrix product, which is worth nothing slow."""

FLAVOURS = {
    "thread": Flavour(
        (
            "-O1",
            "-g1",
            "-fsanitize=thread",
            "-DMOEOS_WORDS_CARRY_ORDER",
            "-DMOEOS_PLANTS",  # with none planted the worlds below are right
        ),
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
        check=False,
    )


def compile_all(flavour: Flavour, sources: Sequence[Path], to: Path) -> list[Path]:
    """The object files of sources, which are below the repository where they are not absolute."""
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

        def make() -> None:
            done = run([str(COMPILER), *options, f"-I{ROOT}", "-c", ROOT / source, "-o", output])
            assert done.returncode == 0, done.stderr

        keep(output, [*options, (ROOT / source).read_text()], INCLUDED, make)
        return output

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return [*pool.map(compile_one, sources)]


def link(flavour: Flavour, objects: Sequence[Path], program: Path) -> Path:
    sanitizers = [option for option in flavour.options if option.startswith("-fsanitize")]
    done = run([str(COMPILER), *sanitizers, *objects, "-pthread", "-o", program])
    assert done.returncode == 0, done.stderr
    return program


def execute(
    flavour: Flavour, program: Path, *arguments: object, planted: str = ""
) -> subprocess.CompletedProcess[str]:
    """Runs a program; without address randomisation, which ThreadSanitizer's shadow memory of older
    compilers does not bear on kernels that randomise many bits. `planted`: the fault's name."""
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []
    if fixed and run([*fixed, "true"]).returncode != 0:
        fixed = []  # a container may forbid it
    environment = flavour.environment | {"MOEOS_PLANT": planted}
    return run([*fixed, program, *map(str, arguments)], **environment)


def gemm_sources() -> list[Path]:
    on_x86 = platform.machine().lower() in ("x86_64", "amd64")
    sources = sorted(path.relative_to(ROOT) for path in (ROOT / TWIN).glob("gemm*.cpp"))
    return [source for source in sources if on_x86 or source.name not in INSTRUCTION_SETS]


def in_one_file(sources: Iterable[Path]) -> str:
    """A source file of several: compiled in two thirds of the time, or less."""
    return "".join(f'#include "{source}"\n' for source in sources)


def as_one_program(sources: Sequence[Path]) -> str:
    """A source file of several that have a `main` each, of which its first argument names one.

    That has the further arguments. Each is in a namespace of its own. The headers are included
    before, and then never again.
    """
    texts = {one: (ROOT / one).read_text() for one in sources}
    lines = {line for text in texts.values() for line in text.splitlines()}
    headers = sorted(line for line in lines if line.startswith("#include"))
    parts = [f'namespace {one.stem} {{\n#include "{one}"\n}}' for one in sources]
    given = {one: "" if "int main()" in texts[one] else "count - 1, arguments + 1" for one in texts}
    chosen = [f'if (name == "{one.stem}") return {one.stem}::main({given[one]});' for one in texts]
    begin = "int main(int count, char** arguments) {\nconst std::string name = arguments[1];"
    return "\n".join(["#include <string>", *headers, *parts, begin, *chosen, "return 2;\n}\n"])


TWIN_SOURCES = [
    TWIN / "forward.cpp",
    TWIN / "crew.cpp",
    TWIN / "explore" / "random_world.cpp",
    TWIN / "explore" / "gradient_world.cpp",
]
WORLDS = ("calls", "damaged_words", "gradients", "virtual_ranks", "workspaces")
"""Programs, test_*.cpp, of ranks of the twin."""
Build = Callable[[str, str], tuple[Path, str]]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Builds `WORLDS` with all of the twin in a flavour, together, in half of the time; returns the
    program, and the argument for one of them."""

    @functools.cache
    def build_once(flavour: str) -> Path:
        folder = tmp_path_factory.mktemp(flavour)
        twin, worlds = folder / "twin.cpp", folder / "worlds.cpp"
        twin.write_text(in_one_file(TWIN_SOURCES))
        worlds.write_text(as_one_program([source_of(f"test_{one}.cpp") for one in WORLDS]))
        objects = compile_all(FLAVOURS[flavour], [twin, worlds, *gemm_sources()], folder)
        return link(FLAVOURS[flavour], objects, folder / "worlds")

    return lambda flavour, test: (build_once(flavour), f"test_{test}")


def assert_clean(done: subprocess.CompletedProcess[str]) -> None:
    report = done.stdout[-4000:] + done.stderr[-8000:]
    assert done.returncode == 0, report
    assert "Sanitizer" not in report
    assert "runtime error" not in report


by_worlds = pytest.mark.parametrize(
    ("seed", "worlds"), all_but([(5, 3)], [(5, 3), (5, 4), (9, 4), (13, 8), (1, 4)])
)
"""The seed of the first world, and how many: the fourth of seed 5 takes as long as ten others."""
by_threads = pytest.mark.parametrize("name", all_but(["thread"], FLAVOURS))
"""The twin is compiled for one sanitizer in every run. `SMALL` and the matrix product are for the
other, which has no threads to watch there."""


@by_worlds
@by_threads
def test_random_worlds_compute_the_right_result(
    name: str, seed: int, worlds: int, build: Build
) -> None:
    flavour = FLAVOURS[name]
    done = execute(flavour, *build(name, "virtual_ranks"), seed, worlds)
    assert_clean(done)
    assert f"{worlds} worlds, 0 failed" in done.stdout


@by_worlds
@by_threads
def test_gradients_of_random_worlds_are_right(
    name: str, seed: int, worlds: int, build: Build
) -> None:
    flavour = FLAVOURS[name]
    done = execute(flavour, *build(name, "gradients"), seed, worlds)
    assert_clean(done)
    assert f"{worlds} worlds, 0 failed" in done.stdout


@by_worlds
@by_threads
def test_random_layers_of_one_workspace_compute_the_right_results(
    name: str, seed: int, worlds: int, build: Build
) -> None:
    flavour = FLAVOURS[name]
    done = execute(flavour, *build(name, "workspaces"), seed, worlds)
    assert_clean(done)
    assert f"{worlds} workspaces, 0 failed" in done.stdout


@by_threads
def test_damaged_words_in_a_heap_are_errors(name: str, build: Build) -> None:
    assert_clean(execute(FLAVOURS[name], *build(name, "damaged_words")))


@by_threads
def test_a_rank_makes_one_call_after_the_other_and_not_for_ever(name: str, build: Build) -> None:
    assert_clean(execute(FLAVOURS[name], *build(name, "calls")))


@pytest.mark.parametrize(
    "flavour",
    [
        pytest.param(FLAVOURS["address"], id="under a sanitizer", marks=pytest.mark.nightly),
        pytest.param(OPTIMISED, id="as it is used"),
    ],
)
def test_matrix_product_alone(flavour: Flavour, tmp_path: Path) -> None:
    objects = compile_all(flavour, [source_of("test_gemm.cpp"), *gemm_sources()], tmp_path)
    done = execute(flavour, link(flavour, objects, tmp_path / "gemm"))
    assert_clean(done)
    assert "portable passed" in done.stdout


def assert_program_passes(source: str, folder: Path) -> None:
    """Of one source file, which includes what it is about."""
    objects = compile_all(PLAIN, [source_of(source)], folder)
    assert_clean(execute(PLAIN, link(PLAIN, objects, folder / "program")))


SMALL = ("arrivals", "few_rows", "formats", "known_parts", "one_source_rows", "products")
SMALL += ("scheduler", "sender", "tile_plan")
"""Programs of one source file, test_*.cpp, which includes what it is about."""
Small = Callable[[str], subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """Runs one of `SMALL` under a sanitizer. They are compiled together, in half of the time."""
    folder, flavour = tmp_path_factory.mktemp("small"), FLAVOURS["address"]

    @functools.cache
    def program() -> Path:
        source = folder / "small.cpp"
        source.write_text(as_one_program([source_of(f"test_{one}.cpp") for one in SMALL]))
        return link(flavour, compile_all(flavour, [source], folder), folder / "small")

    def run_one(name: str) -> subprocess.CompletedProcess[str]:
        done = execute(flavour, program(), f"test_{name}")
        assert_clean(done)
        return done

    return run_one


SENDER_SOURCES = [source_of("test_sender.cpp")]
EXPLORE_SOURCES = [
    TWIN / "forward.cpp",
    TWIN / "crew.cpp",
    TWIN / "explore" / "explore.cpp",
    TWIN / "explore" / "random_world.cpp",
    TWIN / "explore" / "gradient_world.cpp",
    TWIN / "explore" / "hostile_nic.cpp",
    TWIN / "explore" / "schedule.cpp",
    source_of("test_explore.cpp"),
]


def test_a_sender_keeps_every_window_and_the_earliest_failure(small: Small) -> None:
    small("sender")


def test_no_tile_is_loaded_in_more_boxes_than_a_warp_has_lanes_for(tmp_path: Path) -> None:
    assert_program_passes("test_geometry.cpp", tmp_path)


def test_rows_become_tiles_expert_by_expert_or_as_they_arrive(small: Small) -> None:
    small("tile_plan")


def test_a_rank_alone_plans_every_part_once(small: Small) -> None:
    small("one_source_rows")


def test_a_call_is_planned_whole_in_an_order_without_circles(small: Small) -> None:
    small("arrivals")


def test_tiles_of_few_rows_are_the_same_whoever_makes_them(small: Small) -> None:
    small("few_rows")


def test_a_warp_of_many_lanes_plans_as_one_lane_does(tmp_path: Path) -> None:
    assert_program_passes("test_warp_plans.cpp", tmp_path)


@pytest.mark.parametrize("matrices", all_but([20_000], [20_000, 1_000_000]))
def test_numbered_parts_follow_from_counts_of_any_number_of_ranks(
    matrices: int, tmp_path: Path
) -> None:
    objects = compile_all(OPTIMISED, [source_of("test_plan.cpp")], tmp_path)
    assert_clean(execute(OPTIMISED, link(OPTIMISED, objects, tmp_path / "plan"), matrices))


def test_products_follow_each_other_and_parts_say_where_their_rows_lie(small: Small) -> None:
    small("products")


def test_parts_that_everyone_knows_are_all_there_once(small: Small) -> None:
    small("known_parts")


def test_tiles_of_arrived_rows_are_handed_out_once_and_by_turns(small: Small) -> None:
    small("scheduler")


def test_the_explorers_clock_passes_however_many_look(tmp_path: Path) -> None:
    sources = [TWIN / "explore" / "schedule.cpp", source_of("test_schedule.cpp")]
    objects = compile_all(PLAIN, sources, tmp_path)
    assert_clean(execute(PLAIN, link(PLAIN, objects, tmp_path / "schedule")))


def test_searches_find_every_answer_at_every_size(tmp_path: Path) -> None:
    objects = compile_all(PLAIN, [source_of("test_base.cpp")], tmp_path)
    assert_clean(execute(PLAIN, link(PLAIN, objects, tmp_path / "base")))


def test_codes_of_weights_are_the_numbers_that_pytorch_reads(small: Small) -> None:
    done = small("formats")
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
    return compile_all(OPTIMISED, gemm_sources(), tmp_path_factory.mktemp("gemm"))


# --- that these tests can fail ------------------------------------------------------------------

Planted = Literal["threads", "sender", "explorer", "two subscribers"]
Programs = Callable[[Planted], tuple[Any, ...]]
"""What `execute` is given of a program, before the arguments of its own."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """What must notice a planted fault (runtime/words/planted.hpp), and what its report says.

    Attributes:
        program: `THREADED_RUNS` random worlds under ThreadSanitizer, the sender alone, or the
            explorer, perhaps with two returns subscribers.
        seed: of the nearest world that shows it. A change of what a seed draws moves that, so
            `RUNS` seeds are tried from here on.
        report: a pattern in what the program prints, or "" where it ends by a trap.
        takes_long: to be compiled and looked for at night alone.
    """

    program: Planted
    report: str
    seed: int = 1
    takes_long: bool = False


RUNS, SOUND_RUNS, THREADED_RUNS, SAME_RUNS = 1000, 10, 200, 8

FAULTS = {
    "releases_are_relaxed": Fault("threads", "ThreadSanitizer: data race"),
    "signal_overtakes_rows": Fault("threads", "ThreadSanitizer: data race", seed=6),
    "replicated_chunk_overtakes_rows": Fault(
        "threads", "ThreadSanitizer: data race", seed=22, takes_long=True
    ),
    "shares_are_not_ordered": Fault("threads", "ThreadSanitizer: data race"),
    "windows_have_no_end": Fault("sender", "two chunks are put in a window"),
    "later_failures_replace_earlier_ones": Fault(
        "sender", "the failure of the earlier call is raised"
    ),
    "giving_up_hides_failures": Fault("sender", "a host that gives up replaces nothing"),
    "only_the_first_sender_tells": Fault("sender", "the last sender tells of a failure"),
    "records_are_put_again": Fault("sender", "a record is put once"),
    "replicated_rows_are_not_awaited": Fault("explorer", "gives a wrong result|trusted", seed=37),
    "rows_come_with_dropped_pairs": Fault("explorer", "", seed=37),
    "rows_come_with_the_last_pair": Fault("explorer", "without a fault", seed=37),
    "shared_results_are_not_awaited": Fault("explorer", "gives a wrong result", seed=15),
    "shared_counters_stay": Fault(
        "explorer", "without a fault|gives a wrong result|fails after a reset"
    ),
    "experts_share_rows": Fault("explorer", "gives a wrong result"),
    "rows_go_to_the_peers_own_cell": Fault("explorer", ""),
    "echoes_are_sums": Fault("explorer", "without a fault|another fails after a reset", seed=263),
    "flag_overtakes_earlier_runs": Fault("explorer", "gives a wrong result", seed=24),
    "awaited_chunks_are_forgotten": Fault("explorer", "without a fault"),
    "waiting_ranks_are_blamed": Fault("explorer", "and names rank"),
    "inputs_are_not_awaited": Fault("explorer", "gives a wrong result|without a fault"),
    "old_counts_are_planned_by": Fault(
        "explorer", "without a fault|another fails after a reset", seed=754
    ),
    "old_choices_are_planned_by": Fault("explorer", "", seed=577),
    "gathered_rows_are_the_first_again": Fault("explorer", "gives a wrong result"),
    "pairs_share_a_place_between": Fault("explorer", "gives a wrong result", seed=189),
    "tiles_in_place_have_other_tokens": Fault("explorer", "gives a wrong result", seed=12),
    "unsent_tokens_do_not_await_routing": Fault(
        "explorer", "gives a wrong result|without a fault", seed=77
    ),
    "tiles_are_handed_out_twice": Fault("explorer", ""),
    "full_chunks_count_as_replicated": Fault("explorer", "fails with kind", seed=15),
    "second_gemms_come_first": Fault("explorer", "without a fault"),
    "landed_rows_are_not_copied": Fault("explorer", "gives a wrong result", seed=37),
    "results_go_where_old_ones_went": Fault("explorer", "gives a wrong result", seed=95),
    "peers_results_share_a_place": Fault("explorer", "gives a wrong result"),
    "few_rows_begin_where_others_do": Fault(
        "explorer", "gives a wrong result|without a fault", seed=8
    ),
    "another_part_is_found": Fault("explorer", "", seed=8),
    "processors_plan_what_is_told": Fault("explorer", "", seed=80),
    "tiles_are_made_of_what_processors_plan": Fault("explorer", "", seed=80),
    "many_rows_are_planned_as_few": Fault("explorer", "", seed=72),
    "a_credit_stays": Fault("explorer", ""),
    "no_tokens_send_no_counts": Fault("explorer", ""),
    "quarters_count_as_chunks": Fault("explorer", ""),
    "rows_share_places": Fault("explorer", "gives a wrong result", seed=9),
    "places_stay_taken": Fault("explorer", "without a fault"),
    "places_of_cells_are_not_awaited": Fault("explorer", "gives a wrong result"),
    "tails_stay_old": Fault("explorer", "gives a wrong result"),
    "kept_parts_are_lost": Fault("explorer", "without a fault"),
    "torn_descriptors_are_run": Fault("explorer", "", seed=92),
    "empty_places_have_no_counts": Fault("explorer", "without a fault", seed=13),
    "partial_sums_are_not_awaited": Fault("explorer", "gives a wrong result"),
    "sums_do_not_await_the_plan": Fault("explorer", "", seed=629),
    "calls_end_with_one_list": Fault("two subscribers", "seed", seed=2002, takes_long=True),
}


PROGRAMS: dict[Planted, tuple[list[Path], Flavour]] = {
    "sender": (SENDER_SOURCES, PLANTED),
    "explorer": (EXPLORE_SOURCES, PLANTED),
    # Two warps count returned rows, as four do on a GPU. Each is then a thread of its own.
    "two subscribers": (
        EXPLORE_SOURCES,
        dataclasses.replace(
            PLANTED, options=(*PLANTED.options, "-DMOEOS_TWIN_RETURNS_SUBSCRIBERS=2")
        ),
    ),
}


@pytest.fixture(scope="module")
def planted(
    build: Build, gemm_objects: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Programs:
    """Builds a program with all faults, by name, once."""

    @functools.cache
    def build_once(name: Planted) -> tuple[Any, ...]:
        if name == "threads":
            return FLAVOURS["thread"], *build("thread", "virtual_ranks")
        sources, flavour = PROGRAMS[name]
        folder = tmp_path_factory.mktemp("planted")
        source = folder / "program.cpp"
        source.write_text(in_one_file(sources))
        objects = compile_all(flavour, [source], folder)
        return flavour, link(flavour, [*objects, *gemm_objects], folder / "program")

    return build_once


@pytest.mark.parametrize("name", all_but(["sender", "explorer"], PROGRAMS))
def test_nothing_is_noticed_where_nothing_is_planted(name: Planted, planted: Programs) -> None:
    assert_clean(execute(*planted(name), 1, SOUND_RUNS))


@pytest.mark.parametrize(
    "name", all_but([name for name, fault in FAULTS.items() if not fault.takes_long], FAULTS)
)
def test_a_planted_fault_is_noticed(name: str, planted: Programs) -> None:
    fault = FAULTS[name]
    tries = [RUNS]
    if fault.program == "threads":  # whose races are seen by chance: the nearest world comes often
        tries = [1] * SAME_RUNS + [THREADED_RUNS]
    for runs in tries:
        done = execute(*planted(fault.program), fault.seed, runs, planted=name)
        if done.returncode not in (0, 2):
            break
    assert done.returncode not in (0, 2)
    assert re.search(fault.report, done.stdout + done.stderr)
