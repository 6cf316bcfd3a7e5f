"""Copies of folders: what is kept, what is left out, and what a digest stands for."""

import gc
import os
import socket
import stat
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from tests.support.environments.folder_trees import LIMITS, TREES, listing, make

from etude.envserver.storage import copies, folders
from etude.envserver.storage.copies import CopiedFolder
from etude.envserver.storage.folders import FolderLimits, TooLargeError


def copied(source: Path, target: Path, limits: FolderLimits = LIMITS) -> CopiedFolder:
    return copies.copy_folder(source, target, limits=limits, owner=folders.current_owner())


@settings(max_examples=60, deadline=None)
@given(TREES)
def test_a_copy_is_what_it_was_made_of_and_so_is_its_copy(
    tree: dict[str, tuple[str, bytes, int]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source")
        source.mkdir()
        make(source, tree)

        first = copied(source, Path(folder, "first"))
        second = copied(Path(folder, "first"), Path(folder, "second"))

        assert first == second
        assert listing(source) == listing(Path(folder, "first")) == listing(Path(folder, "second"))


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "file").write_bytes(b"other"),
        lambda folder: (folder / "file").write_bytes(b"content\0"),
        lambda folder: (folder / "file").chmod(0o755),
        lambda folder: (folder / "file").rename(folder / "fill"),
        lambda folder: (folder / "new").touch(),
        lambda folder: (folder / "inner").rmdir(),
        lambda folder: ((folder / "link").unlink(), (folder / "link").symlink_to("elsewhere")),
        lambda folder: ((folder / "inner").rmdir(), (folder / "inner").touch()),
    ],
)
def test_any_change_is_another_digest(tmp_path: Path, change: object) -> None:
    source = tmp_path / "source"
    (source / "inner").mkdir(parents=True)
    (source / "file").write_bytes(b"content")
    (source / "link").symlink_to("file")
    before = copied(source, tmp_path / "before")

    assert callable(change)
    change(source)

    assert copied(source, tmp_path / "after").digest != before.digest


def test_holes_stay_holes_and_count_for_nothing(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with (source / "huge").open("wb") as file:
        file.truncate(1 << 40)
        file.seek(1 << 39)
        file.write(b"here")

    found = copied(source, tmp_path / "target", FolderLimits(max_files=2, max_bytes=1 << 17))

    assert found.num_bytes <= 1 << 16
    status = (tmp_path / "target" / "huge").stat()
    assert status.st_size == 1 << 40
    assert status.st_blocks * 512 <= 1 << 17


def test_links_are_not_followed_and_sockets_are_left_out(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("key")
    source = tmp_path / "source"
    source.mkdir()
    (source / "folder").symlink_to(secret)
    (source / "file").symlink_to(secret / "key")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(source / "socket"))
        first = copied(source, tmp_path / "target")

    assert {path.name for path in (tmp_path / "target").iterdir()} == {"folder", "file"}
    assert (tmp_path / "target" / "folder").is_symlink()
    assert first == copied(tmp_path / "target", tmp_path / "again")


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")

    with pytest.raises(OSError, match="link"):
        copied(tmp_path / "link", tmp_path / "target")


@pytest.mark.parametrize("limits", [FolderLimits(3, 1 << 30), FolderLimits(100, 500)])
def test_what_is_too_large_is_refused(tmp_path: Path, limits: FolderLimits) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(4):
        (source / str(number)).write_bytes(b"x" * 200)

    with pytest.raises(TooLargeError):
        copied(source, tmp_path / "target", limits)


def test_what_is_too_deep_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / Path(*["d"] * 100)).mkdir(parents=True)

    with pytest.raises(TooLargeError, match="deep"):
        copied(source, tmp_path / "target")


def test_times_of_change_are_kept_and_special_bits_are_not(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "inner").mkdir(parents=True)
    (source / "program").write_text("x")
    (source / "program").chmod(0o4755)
    for name in ("program", "inner", "."):
        os.utime(source / name, ns=(5, 1_000_000_007))

    copied(source, tmp_path / "target")

    for name in ("program", "inner", "."):
        assert (tmp_path / "target" / name).stat().st_mtime_ns == 1_000_000_007
    assert stat.S_IMODE((tmp_path / "target" / "program").stat().st_mode) == 0o755


def copy_what_is_shut(here: Path) -> None:
    source = here / "source"
    (source / "shut").mkdir(parents=True)
    (source / "shut" / "file").write_text("inside")
    (source / "shut" / "file").chmod(0)
    (source / "shut").chmod(0)
    assert copied(source, here / "first") == copied(here / "first", here / "second")
    for name in ("source", "second"):
        shut = here / name / "shut"
        assert stat.S_IMODE(shut.stat().st_mode) == 0
        shut.chmod(0o700)
        assert stat.S_IMODE((shut / "file").stat().st_mode) == 0
        (shut / "file").chmod(0o600)
        assert (shut / "file").read_text() == "inside"


def test_an_owner_can_copy_what_he_has_shut_from_himself() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        # What other tests left may wait in its destructor for threads that a child does not have.
        gc.disable()
        child = os.fork()
        if child == 0:
            try:
                if os.geteuid() == 0:
                    os.setgroups([])
                    os.setgid(65_534)
                    os.setuid(65_534)
                copy_what_is_shut(Path(folder))
            except BaseException as error:  # noqa: BLE001 - the child must not return into pytest
                os.write(2, repr(error).encode())
                os._exit(1)
            os._exit(0)
        gc.enable()
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize("becomes", ["nothing", "link", "folder", "pipe"])
def test_what_changes_before_it_is_opened_is_left_out_or_copied_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, becomes: str
) -> None:
    source, target, again = tmp_path / "source", tmp_path / "target", tmp_path / "again"
    (source / "b").mkdir(parents=True)
    for name in ("a", "b/c", "d"):
        (source / name).write_bytes(name.encode())
    stat_of, victims = os.stat, {"a", "b"}

    def then(name: str, **options: Any) -> os.stat_result:
        status = stat_of(name, **options)
        if name in victims:
            victims.remove(name)
            (source / name).rename(tmp_path / f"moved-{name}")
            if becomes == "link":
                (source / name).symlink_to("/etc")
            elif becomes == "folder":
                (source / name).mkdir()
            elif becomes == "pipe":
                os.mkfifo(source / name)
        return status

    monkeypatch.setattr(os, "stat", then)

    made = copies.copy_folder(source, target, limits=LIMITS, owner=folders.current_owner())

    kinds = {path.name: stat.S_IFMT(path.lstat().st_mode) for path in target.iterdir()}
    other = {"link": stat.S_IFLNK, "folder": stat.S_IFDIR, "pipe": stat.S_IFIFO}.get(becomes)
    assert kinds == {"d": stat.S_IFREG, **({"a": other, "b": other} if other else {})}
    assert (
        made.digest
        == copies.copy_folder(target, again, limits=LIMITS, owner=folders.current_owner()).digest
    )


def test_a_folder_of_a_command_that_comes_and_goes_can_be_copied(tmp_path: Path) -> None:
    source, stop = tmp_path / "source", threading.Event()
    (source / "deep").mkdir(parents=True)

    def churn() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            path = source / "deep" / f"f{number % 50}"
            path.write_bytes(b"x" * 100)
            (source / "deep" / f"f{(number + 25) % 50}").unlink(missing_ok=True)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for number in range(50):
            copies.copy_folder(
                source, tmp_path / str(number), limits=LIMITS, owner=folders.current_owner()
            )
    finally:
        stop.set()
        thread.join()


def test_names_beyond_the_limit_are_not_even_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(200):
        (tmp_path / "source" / str(number)).mkdir(parents=True)
    seen = 0
    check = copies._Copier._check

    def counted(copier: copies._Copier) -> None:
        nonlocal seen
        seen += 1
        check(copier)

    monkeypatch.setattr(copies._Copier, "_check", counted)
    limits = FolderLimits(max_files=10, max_bytes=99)
    with pytest.raises(TooLargeError):
        copies.copy_folder(
            tmp_path / "source", tmp_path / "t", limits=limits, owner=folders.current_owner()
        )
    assert seen == 11
