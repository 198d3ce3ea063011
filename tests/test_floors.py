# SPDX-License-Identifier: Apache-2.0
"""Rooms of runtime/ and kernels/sm90/ stand on floors: a file includes its own room and those
below."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.processes import ROOT

FLOORS = {
    "runtime": (
        ("words",),
        ("platform",),
        ("memory",),
        ("health", "plan", "queues", "record"),
        ("rows",),
        ("actors",),
    ),
    "kernels/sm90": (
        ("ptx",),
        ("block",),
        ("operands",),
        ("epilogue", "mainloop", "move"),
        ("route",),
        ("combine",),
        ("",),
    ),
}
"""The lowest first; rooms of one floor do not know each other. "": files in no room."""
INCLUDE = re.compile(r'^\s*#\s*include "(.+)"', re.MULTILINE)


def wrong_includes(file: Path, text: str, folder: str) -> list[str]:
    """What a file must not include, such as a room above its own."""
    floors = {room: floor for floor, rooms in enumerate(FLOORS[folder]) for room in rooms}

    def room_of(path: str) -> str:
        below = Path(path).relative_to(folder).parts
        return below[0] if len(below) > 1 else ""

    own = room_of(str(file))
    others = [one for one in INCLUDE.findall(text) if one.startswith(f"{folder}/")]
    outside = [one for one in INCLUDE.findall(text) if not one.startswith("runtime/")]
    wrong = outside if folder == "runtime" else []
    return wrong + [
        one for one in others if room_of(one) != own and floors[room_of(one)] >= floors[own]
    ]


@pytest.mark.parametrize("folder", FLOORS)
def test_a_room_includes_none_on_its_floor_or_above(folder: str) -> None:
    files = [path for path in sorted((ROOT / folder).rglob("*")) if path.is_file()]
    wrong = {
        str(name): found
        for path in files
        if (found := wrong_includes(name := path.relative_to(ROOT), path.read_text(), folder))
    }
    assert len(files) > 40
    assert wrong == {}


def test_an_include_that_runs_up_is_noticed() -> None:
    up = '#include "runtime/actors/os.hpp"'
    assert wrong_includes(Path("runtime/rows/sums.hpp"), up, "runtime")
    assert wrong_includes(
        Path("runtime/plan/plan.hpp"), '#include "runtime/queues/ring.hpp"', "runtime"
    )
    assert not wrong_includes(Path("runtime/actors/sender.hpp"), up, "runtime")
