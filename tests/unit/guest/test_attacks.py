"""Processes that change the workspace under the agent: nothing outside of it is touched.

The agent in Python uses the workspace of a folder, which has attacks of its own.
"""

import ctypes
import os
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path

import pytest
from tests.support.vm import guests

from etude.agent.patterns import GrepQuery
from etude.agent.workspace import ExecResult, PathFault, WorkspaceError, WorkspaceLostError
from etude.envserver.guest.workspace import GuestWorkspace

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
async def workspace(root: Path) -> AsyncIterator[GuestWorkspace]:
    async with guests.guest("go", root) as guest:
        yield GuestWorkspace(guest.channel, refuse)


async def fault(call: Awaitable[object]) -> PathFault:
    with pytest.raises(WorkspaceError) as caught:
        await call
    return caught.value.fault


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_links_are_not_followed(workspace: GuestWorkspace, root: Path, outside: Path) -> None:
    (root / "link").symlink_to(outside / "secret")
    assert await fault(workspace.read("link")) is PathFault.LINK
    assert await fault(workspace.write("link", b"x")) is PathFault.LINK
    await workspace.delete("link")
    assert (outside / "secret").read_bytes() == b"secret add"
    for target in ("/", "..", "../outside"):
        (root / "folder").symlink_to(target)
        assert await fault(workspace.read("folder/secret")) is PathFault.LINK
        assert await fault(workspace.write("folder/new", b"x")) is PathFault.LINK
        assert await fault(workspace.list("folder")) is PathFault.LINK
        query = GrepQuery(pattern="add", path="folder")
        assert await fault(workspace.grep(query)) is PathFault.LINK
        (root / "folder").unlink()
    assert names(outside) == ["secret"]


async def test_searches_see_only_regular_files(
    workspace: GuestWorkspace, root: Path, outside: Path
) -> None:
    (root / "link").symlink_to(outside)
    (root / "self").symlink_to(".")
    os.mkfifo(root / "pipe")
    (root / os.fsdecode(b"\xff")).write_bytes(b"add")
    with (root / "huge").open("wb") as file:
        file.truncate(1 << 40)
    assert await workspace.glob("**") == ["a.py", "huge"]
    found = await workspace.grep(GrepQuery(pattern="add"))
    assert [file.path for file in found] == ["a.py"]
    kinds = [(info.path, info.kind.value) for info in await workspace.list("")]
    assert kinds == [
        *(("a.py", "file"), ("huge", "file"), ("link", "other")),
        *(("pipe", "other"), ("self", "other")),
    ]
    assert await fault(workspace.read("huge")) is PathFault.TOO_LARGE


async def test_pipes_and_sockets_do_not_hang_anything(
    workspace: GuestWorkspace, root: Path
) -> None:
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(root / "s"))
        for name in ("pipe", "s"):
            assert await fault(workspace.read(name)) is PathFault.NOT_A_FILE
            assert await fault(workspace.write(name, b"x")) is PathFault.NOT_A_FILE


async def test_a_file_that_lies_about_its_size_is_bounded(workspace: GuestWorkspace) -> None:
    proc = GuestWorkspace(workspace.channel, refuse, cwd="/proc/self")
    assert await proc.read("comm") == b"guestagent\n"
    assert b"Rss" in await proc.read("smaps")


async def test_deep_folders_are_walked_to_a_limit(workspace: GuestWorkspace, root: Path) -> None:
    folder = root
    for _ in range(200):
        folder /= "d"
    folder.mkdir(parents=True)
    (folder / "deep.py").write_bytes(b"add")
    assert await workspace.glob("**") == ["a.py"]


async def test_too_many_names_are_refused(workspace: GuestWorkspace, root: Path) -> None:
    many = root / "many"
    many.mkdir()
    for number in range(100_001):
        (many / str(number)).touch()
    try:
        with pytest.raises(WorkspaceError, match="many: holds more than"):
            await workspace.list("many")
        with pytest.raises(WorkspaceError, match="many: holds more than"):
            await workspace.glob("*")
        assert await workspace.read("a.py") == b"add\n"
    finally:
        shutil.rmtree(many)


async def test_a_write_keeps_the_mode_and_leaves_a_hard_links_file_alone(
    workspace: GuestWorkspace, root: Path, outside: Path
) -> None:
    (root / "run.sh").write_bytes(b"old")
    (root / "run.sh").chmod(0o4755)
    await workspace.write("run.sh", b"new")
    assert (root / "run.sh").stat().st_mode & 0o7777 == 0o755
    os.link(outside / "secret", root / "hard")
    await workspace.write("hard", b"x")
    assert (outside / "secret").read_bytes() == b"secret add"
    assert names(root) == ["a.py", "hard", "run.sh"]


async def test_a_search_without_end_is_stopped(workspace: GuestWorkspace, root: Path) -> None:
    for number in range(3000):
        (root / f"{number}.py").write_bytes(b"b\n" * 3000)
    workspace.search_limit_s = 0.001
    assert await fault(workspace.grep(GrepQuery(pattern="[a-z]+x"))) is PathFault.TOO_SLOW


async def test_a_workspace_that_is_gone_is_the_platforms_fault(
    workspace: GuestWorkspace, root: Path
) -> None:
    shutil.move(root, root.with_name("moved"))
    for call in (workspace.read("a.py"), workspace.write("b", b""), workspace.glob("*")):
        with pytest.raises(WorkspaceLostError):
            await call


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
    workspace: GuestWorkspace, outside: Path
) -> None:
    faults: set[PathFault] = set()
    for attempt in range(500):
        try:
            assert await workspace.read("d/secret") == b"inside"
            await workspace.write(f"d/new{attempt % 3}", b"x")
            for file in await workspace.grep(GrepQuery(pattern=".")):
                assert all("secret add" not in line.text for line in file.lines)
        except WorkspaceError as error:
            faults.add(error.fault)
    # NOT_A_FOLDER: a link when it was entered, and a folder again when it was looked at.
    assert faults <= {PathFault.LINK, PathFault.NOT_A_FOLDER}
    assert names(outside) == ["secret"]
