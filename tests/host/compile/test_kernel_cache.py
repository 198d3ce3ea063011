# SPDX-License-Identifier: Apache-2.0
"""The cache of kernels: made once, found again, and only what this user alone has written."""

from __future__ import annotations

import os
import stat
import threading
import time
import warnings
from pathlib import Path

import pytest

from moeos.compile import kernel_cache
from moeos.compile.kernel_cache import get_or_make
from moeos.system import files
from tests.processes import ForkedRanks

KEY = "ab" + "0" * 62
ANOTHER = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "moeos"


class Maker:
    """Makes an entry, and counts how often."""

    def __init__(self, entry: bytes = b"code") -> None:
        self.entry = entry
        self.calls = 0

    def __call__(self) -> bytes:
        self.calls += 1
        return self.entry


def file_of(folder: Path) -> Path:
    [path] = folder.glob("*.kernel")
    return path


def test_an_entry_is_made_once_and_found_the_second_time(folder: Path) -> None:
    make = Maker()
    assert get_or_make(KEY, make, folder) == (b"code", False)
    assert get_or_make(KEY, make, folder) == (b"code", True)
    assert make.calls == 1


def test_other_keys_are_other_entries(folder: Path) -> None:
    get_or_make(KEY, Maker(), folder)
    assert get_or_make(KEY[:-1] + "1", Maker(b"other"), folder) == (b"other", False)


def test_folder_and_entry_are_the_owners_alone(folder: Path) -> None:
    before = os.umask(0)
    try:
        get_or_make(KEY, Maker(), folder)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert file_of(folder).stat().st_mode & 0o777 == 0o600


def test_a_folder_that_others_may_enter_is_closed_to_them(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    get_or_make(KEY, Maker(), folder)
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_folder_that_others_may_write_to_is_not_used(folder: Path, mode: int) -> None:
    get_or_make(KEY, Maker(b"planted"), folder)
    folder.chmod(mode)
    with pytest.warns(UserWarning, match="others may write to the folder"):
        assert get_or_make(KEY, Maker(), folder) == (b"code", False)


def test_a_folder_that_is_a_link_is_not_used(folder: Path, tmp_path: Path) -> None:
    get_or_make(KEY, Maker(b"planted"), folder)
    (tmp_path / "link").symlink_to(folder)
    with pytest.warns(UserWarning, match="the folder is a link"):
        assert get_or_make(KEY, Maker(), tmp_path / "link") == (b"code", False)


def test_an_entry_that_was_renamed_is_not_another_keys(folder: Path) -> None:
    get_or_make(KEY, Maker(b"another"), folder)
    other = KEY[:-1] + "1"
    file_of(folder).rename(folder / f"{other}.kernel")
    assert get_or_make(other, Maker(), folder) == (b"code", False)


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket"])
def test_what_is_no_file_is_no_entry(folder: Path, kind: str) -> None:
    folder.mkdir(mode=0o700, parents=True)
    path = folder / f"{KEY}.kernel"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        os.mknod(path, stat.S_IFSOCK | 0o600)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a folder cannot be replaced by the entry
        assert get_or_make(KEY, Maker(), folder) == (b"code", False)


def test_a_lock_that_cannot_be_opened_keeps_nobody_from_compiling(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True)
    (folder / f"{KEY[:2]}.lock").symlink_to(folder / "elsewhere")
    with pytest.warns(UserWarning, match="compiled kernels are not kept in"):
        assert get_or_make(KEY, Maker(), folder) == (b"code", False)
    assert not (folder / "elsewhere").exists()


@needs_root
def test_what_another_user_really_owns_is_not_loaded(folder: Path) -> None:
    get_or_make(KEY, Maker(b"planted"), folder)
    os.chown(file_of(folder), ANOTHER, ANOTHER)
    assert get_or_make(KEY, Maker(b"mine"), folder) == (b"mine", False)
    assert file_of(folder).stat().st_uid == os.geteuid()
    os.chown(folder, ANOTHER, ANOTHER)
    with pytest.warns(UserWarning, match=f"belongs to user {ANOTHER}"):
        assert get_or_make(KEY, Maker(), folder) == (b"code", False)


def test_unfinished_files_have_names_that_nobody_can_guess(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    replace = os.replace

    def note(source: str, target: Path) -> None:
        assert os.stat(source).st_mode & 0o777 == 0o600
        names.append(os.path.basename(source))
        replace(source, target)

    monkeypatch.setattr("moeos.compile.kernel_cache.os.replace", note)
    for number in range(2):
        get_or_make(f"{number:064x}", Maker(), folder)
    parts = {name[16:] for name in names}
    assert len(parts) == 2
    assert all(len(part) >= 12 for part in parts)


@pytest.mark.parametrize("damage", ["truncated", "changed", "lengthened", "empty", "no-magic"])
def test_a_damaged_entry_is_made_again_and_replaced(folder: Path, damage: str) -> None:
    make = Maker()
    get_or_make(KEY, make, folder)
    path = file_of(folder)
    whole = path.read_bytes()
    path.write_bytes(
        {
            "truncated": whole[:-1],
            "changed": whole[:-1] + b"!",
            "lengthened": whole + b"!",
            "empty": b"",
            "no-magic": b"?" + whole[1:],
        }[damage]
    )
    assert get_or_make(KEY, make, folder) == (b"code", False)
    assert path.read_bytes() == whole


def test_an_entry_that_others_may_write_is_not_loaded(folder: Path) -> None:
    make = Maker()
    get_or_make(KEY, make, folder)
    file_of(folder).chmod(0o622)
    assert get_or_make(KEY, make, folder) == (b"code", False)
    assert file_of(folder).stat().st_mode & 0o777 == 0o600


def test_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    get_or_make(KEY, Maker(b"planted"), folder)
    elsewhere = tmp_path / "elsewhere"
    file_of(folder).rename(elsewhere)
    (folder / f"{KEY}.kernel").symlink_to(elsewhere)
    assert get_or_make(KEY, Maker(), folder) == (b"code", False)
    assert not file_of(folder).is_symlink()


def test_an_entry_of_another_owner_is_not_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get_or_make(KEY, Maker(b"planted"), folder)
    owner = os.geteuid()
    looked: list[int] = []

    def another_for_files() -> int:
        """This user for the folder, which is asked for first, and another one then."""
        looked.append(owner)
        return owner if len(looked) == 1 else owner + 1

    monkeypatch.setattr("moeos.compile.kernel_cache.os.geteuid", another_for_files)
    assert get_or_make(KEY, Maker(), folder) == (b"code", False)
    assert len(looked) > 1


def test_a_folder_of_another_owner_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get_or_make(KEY, Maker(b"planted"), folder)
    owner = os.geteuid()
    monkeypatch.setattr("moeos.compile.kernel_cache.os.geteuid", lambda: owner + 1)
    with pytest.warns(UserWarning, match=f"belongs to user {owner}, not to {owner + 1}"):
        assert get_or_make(KEY, Maker(), folder) == (b"code", False)


def test_without_a_usable_folder_entries_are_made_each_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    make = Maker()
    for _ in range(2):
        with pytest.warns(UserWarning, match="compiled kernels are not kept in"):
            assert get_or_make(KEY, make, tmp_path / "file" / "cache") == (b"code", False)
    assert make.calls == 2


def test_an_entry_that_is_too_large_is_not_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moeos.compile.kernel_cache.MAX_ENTRY_BYTES", 3)
    with pytest.warns(UserWarning, match="has 4 bytes; at most 3"):
        assert get_or_make(KEY, Maker(), folder) == (b"code", False)
    assert not list(folder.glob("*.kernel"))


def test_processes_that_start_together_make_an_entry_once(folder: Path, tmp_path: Path) -> None:
    def make() -> bytes:
        with open(tmp_path / "made", "a") as file:
            file.write("x")
        time.sleep(0.3)
        return b"code"

    ranks = ForkedRanks(lambda rank: get_or_make(KEY, make, folder), 6)
    outcomes = ranks.ended(30)
    assert sorted(outcomes) == [(b"code", False)] + [(b"code", True)] * 5
    assert (tmp_path / "made").read_text() == "x"


def test_threads_that_start_together_make_an_entry_once(folder: Path) -> None:
    make = Maker()

    def slow() -> bytes:
        time.sleep(0.2)
        return make()

    found: list[tuple[bytes, bool]] = []
    threads = [
        threading.Thread(target=lambda: found.append(get_or_make(KEY, slow, folder)))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(found) == [(b"code", False)] + [(b"code", True)] * 5
    assert make.calls == 1


def test_a_maker_that_fails_leaves_the_entry_to_the_next(folder: Path) -> None:
    def fail() -> bytes:
        raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):
        get_or_make(KEY, fail, folder)
    assert get_or_make(KEY, Maker(), folder) == (b"code", False)


def test_a_lock_that_is_held_too_long_is_not_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moeos.compile.kernel_cache.LOCK_SECONDS", 0.2)

    def while_held() -> bytes:
        thread = threading.Thread(target=lambda: results.append(get_or_make(KEY, inner, folder)))
        thread.start()
        thread.join(10)
        return b"outer"

    inner = Maker(b"inner")
    results: list[tuple[bytes, bool]] = []
    assert get_or_make(KEY, while_held, folder) == (b"outer", False)
    assert results == [(b"inner", False)]


def test_the_least_recently_used_entries_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeos.compile.kernel_cache.MAX_ENTRIES", 2)
    keys = [f"{number:064x}" for number in range(3)]
    for age, key in zip((30, 20), keys, strict=False):
        get_or_make(key, Maker(), folder)
        os.utime(folder / f"{key}.kernel", (time.time() - age,) * 2)
    assert get_or_make(keys[0], Maker(), folder)[1]  # used again, so the second is the oldest now
    get_or_make(keys[2], Maker(), folder)
    assert [get_or_make(key, Maker(), folder)[1] for key in (keys[0], keys[2])] == [True, True]
    assert not (folder / f"{keys[1]}.kernel").exists()


@pytest.mark.parametrize(
    ("base", "expected"),
    [("/x/cache", "/x/cache/moeos"), ("relative", "/h/.cache/moeos"), ("", "/h/.cache/moeos")],
)
def test_the_default_folder_is_where_the_desktop_standard_says(
    base: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    monkeypatch.setenv("HOME", "/h")
    assert files.cache_folder() == Path(expected)


def test_a_user_without_a_home_directory_gets_a_warning_and_a_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")  # as pathlib does

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(kernel_cache.Path, "home", no_home)
    with pytest.warns(UserWarning, match="are not kept: this user has no home directory; set XDG"):
        assert get_or_make(KEY, Maker()) == (b"code", False)


@pytest.mark.parametrize("home", ["a file", "nowhere to write"])
def test_a_home_directory_that_cannot_be_used_gives_a_warning_and_a_kernel(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "home"
    if home == "a file":
        place.write_text("")
    else:
        place = Path("/proc/home")  # nobody makes a folder there, root included
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(place))
    with pytest.warns(UserWarning, match="compiled kernels are not kept in"):
        assert get_or_make(KEY, Maker()) == (b"code", False)
