"""A hostile process in the folder: links, pipes, races, sizes. Nothing outside is touched."""

import asyncio
import ctypes
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent.patterns import GrepQuery
from etude.agent.workspace import (
    MAX_FILE_BYTES,
    ExecResult,
    FolderWorkspace,
    PathFault,
    WorkspaceError,
    WorkspaceLostError,
)

AT_FDCWD, RENAME_EXCHANGE = -100, 2


async def refuse(command: str, timeout_s: float) -> ExecResult:
    raise AssertionError(f"no command should run: {command} {timeout_s}")


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret").write_bytes(b"secret add")
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    (folder / "a.py").write_bytes(b"add\n")
    return folder


@pytest.fixture
def workspace(root: Path) -> FolderWorkspace:
    return FolderWorkspace(root, refuse)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def fault(call: object) -> PathFault:
    assert asyncio.iscoroutine(call)
    with pytest.raises(WorkspaceError) as caught:
        await call
    return caught.value.fault


async def test_a_link_to_a_file_outside_is_not_followed(
    workspace: FolderWorkspace, root: Path, outside: Path
) -> None:
    (root / "link").symlink_to(outside / "secret")
    assert await fault(workspace.read("link")) is PathFault.LINK
    assert await fault(workspace.write("link", b"x")) is PathFault.LINK
    assert (outside / "secret").read_bytes() == b"secret add"
    await workspace.delete("link")
    assert (outside / "secret").exists()


@pytest.mark.parametrize("target", ["/", "..", "../outside"])
async def test_a_link_to_a_folder_outside_is_not_entered(
    workspace: FolderWorkspace, root: Path, outside: Path, target: str
) -> None:
    (root / "link").symlink_to(target)
    assert await fault(workspace.read("link/secret")) is PathFault.LINK
    assert await fault(workspace.write("link/new", b"x")) is PathFault.LINK
    assert await fault(workspace.list("link")) is PathFault.LINK
    assert await fault(workspace.grep(GrepQuery(pattern="add", path="link"))) is PathFault.LINK
    assert names(outside) == ["secret"]


async def test_searches_see_no_link(workspace: FolderWorkspace, root: Path, outside: Path) -> None:
    (root / "link").symlink_to(outside)
    (root / "file").symlink_to(outside / "secret")
    assert await workspace.glob("**") == ["a.py"]
    assert [file.path for file in await workspace.grep(GrepQuery(pattern="add"))] == ["a.py"]
    assert [info.kind.value for info in await workspace.list("")] == ["file", "other", "other"]


async def test_links_that_point_at_each_other_are_harmless(
    workspace: FolderWorkspace, root: Path
) -> None:
    (root / "x").symlink_to("y")
    (root / "y").symlink_to("x")
    (root / "self").symlink_to(".")
    assert await fault(workspace.read("x")) is PathFault.LINK
    assert await workspace.glob("**") == ["a.py"]


async def test_a_pipe_does_not_hang_anything(workspace: FolderWorkspace, root: Path) -> None:
    os.mkfifo(root / "pipe")
    async with asyncio.timeout(30):  # far above any honest duration; a blocked open never returns
        assert await fault(workspace.read("pipe")) is PathFault.NOT_A_FILE
        assert await fault(workspace.write("pipe", b"x")) is PathFault.NOT_A_FILE
        assert await workspace.glob("**") == ["a.py"]
        assert len(await workspace.grep(GrepQuery(pattern="add"))) == 1


async def test_a_socket_is_no_file(workspace: FolderWorkspace, root: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(root / "s"))
        assert await fault(workspace.read("s")) is PathFault.NOT_A_FILE


async def test_a_huge_file_is_refused_without_being_read(
    workspace: FolderWorkspace, root: Path
) -> None:
    with (root / "huge").open("wb") as file:
        file.truncate(1 << 40)
    assert await fault(workspace.read("huge")) is PathFault.TOO_LARGE
    assert [file.path for file in await workspace.grep(GrepQuery(pattern="add"))] == ["a.py"]


async def test_a_file_that_lies_about_its_size_is_bounded(root: Path) -> None:
    # Files of /proc say 0 bytes and go on for as long as they are read.
    workspace = FolderWorkspace(Path("/proc/self"), refuse)
    assert await workspace.read("comm")
    assert len(await workspace.read("smaps")) <= MAX_FILE_BYTES


async def test_deep_folders_are_walked_to_a_limit(workspace: FolderWorkspace, root: Path) -> None:
    folder = root
    for _ in range(200):
        folder /= "d"
    folder.mkdir(parents=True)
    (folder / "deep.py").write_bytes(b"add")
    assert await workspace.glob("**") == ["a.py"]
    assert await fault(workspace.read("d/" * 200 + "deep.py")) is PathFault.BAD_NAME


async def test_a_search_without_end_is_stopped(root: Path) -> None:
    workspace = FolderWorkspace(root, refuse, search_limit_s=-1)
    assert await fault(workspace.grep(GrepQuery(pattern="add"))) is PathFault.TOO_SLOW


async def test_names_that_are_no_text_are_left_out(workspace: FolderWorkspace, root: Path) -> None:
    (root / os.fsdecode(b"\xff\xfe")).write_bytes(b"add")
    assert [info.path for info in await workspace.list("")] == ["a.py"]
    assert await workspace.glob("**") == ["a.py"]


async def test_a_write_keeps_the_mode_and_leaves_no_trace(
    workspace: FolderWorkspace, root: Path
) -> None:
    (root / "run.sh").write_bytes(b"old")
    (root / "run.sh").chmod(0o4755)
    await workspace.write("run.sh", b"new")
    assert (root / "run.sh").stat().st_mode & 0o7777 == 0o755
    assert names(root) == ["a.py", "run.sh"]


async def test_a_write_replaces_a_hard_link_and_not_its_file(
    workspace: FolderWorkspace, root: Path, outside: Path
) -> None:
    os.link(outside / "secret", root / "hard")
    await workspace.write("hard", b"x")
    assert (outside / "secret").read_bytes() == b"secret add"


async def test_a_workspace_that_is_gone_is_the_platforms_fault(
    workspace: FolderWorkspace, root: Path
) -> None:
    shutil.move(root, root.with_name("moved"))
    for call in (workspace.read("a.py"), workspace.write("b", b""), workspace.glob("*")):
        with pytest.raises(WorkspaceLostError):
            await call


async def test_a_full_disk_is_named(
    workspace: FolderWorkspace, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    assert await fault(workspace.write("b.py", b"x")) is PathFault.NO_SPACE
    assert names(root) == ["a.py"]


@pytest.fixture
def swapper(root: Path, outside: Path) -> Iterator[None]:
    """Exchanges root/d between a folder and a link to the outside as fast as it can."""
    (root / "d").mkdir()
    (root / "d" / "secret").write_bytes(b"inside")
    (root / "l").symlink_to(outside)
    stop = threading.Event()

    exchange = ctypes.CDLL(None, use_errno=True).renameat2

    def swap() -> None:
        while not stop.is_set():
            pair = (AT_FDCWD, bytes(root / "d"), AT_FDCWD, bytes(root / "l"))
            assert exchange(*pair, RENAME_EXCHANGE) == 0

    thread = threading.Thread(target=swap)
    thread.start()
    yield
    stop.set()
    thread.join()


@pytest.mark.usefixtures("swapper")
async def test_a_folder_exchanged_for_a_link_never_leads_outside(
    workspace: FolderWorkspace, outside: Path
) -> None:
    faults: set[PathFault] = set()
    for attempt in range(2000):
        try:
            assert await workspace.read("d/secret") == b"inside"
            await workspace.write(f"d/new{attempt % 3}", b"x")
        except WorkspaceError as error:
            faults.add(error.fault)
    # NOT_A_FOLDER: a link when it was entered, and a folder again when it was looked at.
    assert faults <= {PathFault.LINK, PathFault.NOT_A_FOLDER}
    assert names(outside) == ["secret"]


hostile = st.lists(
    st.sampled_from(
        ["..", ".", "", "link", "loop", "a.py", "/", "etc", "\0", "~", "secret", "sub"]
    ),
    max_size=6,
).map("/".join)


@given(path=hostile)
def test_no_path_reads_or_writes_outside(
    tmp_path_factory: pytest.TempPathFactory, path: str
) -> None:
    base = tmp_path_factory.mktemp("attack")
    (base / "secret").write_bytes(b"secret")
    root = base / "root"
    (root / "sub").mkdir(parents=True)
    (root / "link").symlink_to(base)
    (root / "sub" / "loop").symlink_to("..")
    workspace = FolderWorkspace(root, refuse)

    async def attack() -> None:
        for call in (workspace.read(path), workspace.write(path, b"x"), workspace.delete(path)):
            try:
                assert await call != b"secret"
            except WorkspaceError:
                continue

    asyncio.run(attack())
    assert sorted(p.name for p in base.iterdir()) == ["root", "secret"]
    assert (base / "secret").read_bytes() == b"secret"
