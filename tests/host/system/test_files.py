# SPDX-License-Identifier: Apache-2.0
"""What a file holds is replaced in one step; links are followed, and pipes are written."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from moeos.cli.shared.output import write_json, write_text
from moeos.cli.tensors import write_tensors
from moeos.system.files import replace

TENSORS = {"x": torch.arange(6.0).view(2, 3)}
WRITERS: dict[str, tuple[Callable[[Path], None], Callable[[bytes], bool]]] = {
    "replace": (lambda path: replace(path, "the new"), lambda found: found == b"the new"),
    "write_text": (lambda path: write_text(path, "the new"), lambda found: found == b"the new"),
    "write_json": (lambda path: write_json(path, {"a": 1}), lambda found: b'"a": 1' in found),
    "write_tensors": (
        lambda path: write_tensors(path, TENSORS),
        lambda found: torch.equal(load(found)["x"], TENSORS["x"]),
    ),
}
writers = pytest.mark.parametrize(("write", "right"), WRITERS.values(), ids=WRITERS)


@writers
def test_a_link_is_followed(
    write: Callable[[Path], None], right: Callable[[bytes], bool], tmp_path: Path
) -> None:
    (tmp_path / "inner").mkdir()
    for there in (True, False):
        target = tmp_path / "inner" / f"target-{there}"
        link = tmp_path / f"link-{there}"
        link.symlink_to(target)
        if there:
            target.write_bytes(b"the old, which is longer than all that is new" * 10)
            target.chmod(0o640)
        write(link)
        assert link.is_symlink()
        assert right(target.read_bytes())
        if there:
            assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert sorted(os.listdir(tmp_path / "inner")) == ["target-False", "target-True"]


@writers
def test_a_pipe_is_written_and_stays_one(
    write: Callable[[Path], None], right: Callable[[bytes], bool], tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # Open for both, so that nobody waits where the pipe is replaced.
    held = os.open(pipe, os.O_RDWR)
    os.set_blocking(held, False)
    try:
        write(pipe)
        assert stat.S_ISFIFO(pipe.lstat().st_mode)
        assert right(os.read(held, 1 << 16))
    finally:
        os.close(held)
    assert os.listdir(tmp_path) == ["pipe"]


@writers
def test_a_new_file_has_the_mode_that_the_umask_leaves(
    write: Callable[[Path], None], right: Callable[[bytes], bool], tmp_path: Path
) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path / "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640
    assert right((tmp_path / "new").read_bytes())


@writers
def test_a_file_that_cannot_be_written_is_named_and_nothing_is_left(
    write: Callable[[Path], None], right: Callable[[bytes], bool], tmp_path: Path
) -> None:
    with pytest.raises(OSError, match="absent/file") as error:
        write(tmp_path / "absent" / "file")
    assert error.value.filename == str(tmp_path / "absent" / "file")
    assert os.listdir(tmp_path) == []


def test_who_reads_beside_a_replacement_finds_a_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    contents = [bytes([number]) * 100_000 for number in range(4)]
    file.write_bytes(contents[0])
    ended = threading.Event()

    def replace_on() -> None:
        for number in range(200):
            replace(file, contents[number % 4])
        ended.set()

    writer = threading.Thread(target=replace_on)
    writer.start()
    found = set()
    while not ended.is_set():
        found.add(file.read_bytes())
    writer.join()
    assert found <= set(contents)
    assert os.listdir(tmp_path) == ["file"]


def test_what_was_read_by_mapping_a_file_stays_when_it_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"a" * 4096)
    mapped = torch.from_file(str(file), size=4096, dtype=torch.uint8)
    replace(file, b"b")
    assert mapped.eq(ord("a")).all()
