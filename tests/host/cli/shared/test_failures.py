# SPDX-License-Identifier: Apache-2.0
"""How commands end: one line, the right exit code, and one voice for what all ranks refuse."""

import pytest
import typer

from moeos import NumericalError, PeerTimeout, World
from moeos.cli.shared import failures
from moeos.world import virtual


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("bad\nvalue"), 2),
        (TypeError("bad type"), 2),
        (FileNotFoundError(2, "No such file or directory", "x.toml"), 2),
        (PeerTimeout("rank 1 is gone"), 3),
        (MemoryError(), 3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_is_one_line_and_an_exit_code(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> int:
        raise error

    with pytest.raises(typer.Exit) as ended:
        failures.finish(command)
    assert ended.value.exit_code == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("moeos: ")
    assert len(lines[0]) > len("moeos: ")


def test_what_one_rank_cannot_prepare_is_refused_by_all_in_its_words() -> None:
    def run(world: World) -> str:
        def prepare() -> int:
            if world.rank == 2:
                raise ValueError("this is wrong")
            return world.rank

        with pytest.raises(failures.Refused) as refused:
            failures.agree(world, prepare, "a test")
        return str(refused.value)

    assert virtual.run(run, ranks=3) == ["rank 2: this is wrong"] * 3


def test_what_all_ranks_can_prepare_is_each_ranks_own() -> None:
    found = virtual.run(lambda world: failures.agree(world, lambda: world.rank, "a test"), ranks=3)
    assert found == [0, 1, 2]


@pytest.mark.parametrize("error", [failures.Refused("no"), NumericalError("not finite")])
def test_what_all_ranks_refuse_is_said_once(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(world: World) -> int:
        def command() -> int:
            raise error

        return failures.together(world, command)

    assert virtual.run(run, ranks=3) == [2, 2, 2]
    assert capsys.readouterr().err == f"moeos: {error}\n"
