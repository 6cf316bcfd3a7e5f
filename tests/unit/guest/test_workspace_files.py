"""The files of a guest's workspace as a value, against the same folder read on the host."""

import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.vm import guests

from etude.agent.workspace import ExecResult, PathFault, WorkspaceError, WorkspaceLostError
from etude.envserver.guest import workspace_files
from etude.envserver.guest.calls import GuestRequest
from etude.envserver.guest.channel import GuestChannel
from etude.envserver.guest.workspace import GuestWorkspace
from etude.envserver.storage import folders, trees
from etude.envserver.storage.folders import FolderLimits, TooLargeError
from etude.v1 import guest_pb2

ROOMY = FolderLimits(max_files=1000, max_bytes=1 << 22)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "one.py").write_bytes(b"one\n")
    (folder / "run.sh").write_bytes(b"run\n")
    (folder / "run.sh").chmod(0o755)
    (folder / ".hidden").write_bytes(os.urandom(300_000))
    return folder


@pytest.fixture(params=guests.AGENTS)
async def channel(request: pytest.FixtureRequest, root: Path) -> AsyncIterator[GuestChannel]:
    async with guests.guest(request.param, root) as guest:
        yield guest.channel


async def test_content_is_what_the_host_would_read(channel: GuestChannel, root: Path) -> None:
    assert await workspace_files.workspace_content(channel, ROOMY) == folders.read_tree(root, ROOMY)
    assert (await workspace_files.workspace_content(channel, ROOMY)).is_plain


@pytest.mark.parametrize("odd", ["link", "pipe", "empty folder", "name that is no text"])
async def test_a_workspace_that_files_do_not_describe_is_not_plain(
    channel: GuestChannel, root: Path, odd: str
) -> None:
    match odd:
        case "link":
            (root / "link").symlink_to("/etc/passwd")
        case "pipe":
            os.mkfifo(root / "pipe")
        case "empty folder":
            (root / "empty").mkdir()
        case _:
            (root / os.fsdecode(b"\xff")).write_bytes(b"x")
    found = await workspace_files.workspace_content(channel, ROOMY)
    assert found == folders.read_tree(root, ROOMY)
    assert not found.is_plain


@pytest.mark.parametrize("limits", [FolderLimits(3, 1 << 20), FolderLimits(100, 1000)])
async def test_more_than_the_limits_allow_is_refused(
    channel: GuestChannel, limits: FolderLimits
) -> None:
    with pytest.raises(TooLargeError):
        await workspace_files.workspace_content(channel, limits)


async def test_changes_are_those_since_the_mark(channel: GuestChannel, root: Path) -> None:
    before = folders.read_tree(root, ROOMY).tree
    await workspace_files.mark_workspace(channel, "start")
    assert not (await workspace_files.changed_files(channel, "start", ROOMY)).ListFields()
    (root / "a" / "one.py").write_bytes(b"ONE\n")
    (root / "run.sh").chmod(0o644)
    (root / ".hidden").unlink()
    (root / "new").write_bytes(b"")
    changes = await workspace_files.changed_files(channel, "start", ROOMY)
    assert changes == trees.tree_difference(before, folders.read_tree(root, ROOMY).tree)
    assert [file.path for file in changes.written] == ["a/one.py", "new", "run.sh"]


async def test_a_mark_that_nobody_made_is_an_error(channel: GuestChannel) -> None:
    with pytest.raises(WorkspaceLostError, match="no such mark"):
        await workspace_files.changed_files(channel, "never", ROOMY)


async def test_a_write_may_expect_what_it_replaces(channel: GuestChannel, root: Path) -> None:
    async def write(expected: bytes) -> int:
        asked = guest_pb2.GuestWrite(
            path="run.sh", size=3, sha256=digest(b"new"), expected_sha256=expected
        )
        operation = guest_pb2.GuestCall(write=asked)
        reply = await channel.call(GuestRequest(operation=operation, data=b"new", deadline_s=60))
        return reply.result.status

    assert await write(digest(b"other")) == guest_pb2.GUEST_STATUS_CONFLICT
    assert (root / "run.sh").read_bytes() == b"run\n"
    assert await write(digest(b"run\n")) == guest_pb2.GUEST_STATUS_OK
    assert (root / "run.sh").read_bytes() == b"new"
    assert (root / "run.sh").stat().st_mode & 0o777 == 0o755


def digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


async def test_hashes_name_every_file(channel: GuestChannel, root: Path) -> None:
    operation = guest_pb2.GuestCall(hashes=guest_pb2.GuestHashes())
    reply = await channel.call(GuestRequest(operation=operation, deadline_s=60))
    found = guest_pb2.GuestDigests.FromString(reply.data[0]).files
    files = folders.read_tree(root, ROOMY).tree
    assert {each.path: each.sha256 for each in found} == {
        path: digest(file.content) for path, file in files.items()
    }


async def test_another_folder_may_be_the_root_of_a_call(
    channel: GuestChannel, tmp_path: Path
) -> None:
    tests = GuestWorkspace(channel, _refuse, cwd=str(tmp_path / "tests"))
    with pytest.raises(WorkspaceLostError):
        await tests.read("hidden.py")
    (tmp_path / "tests").mkdir()
    await tests.write("deep/hidden.py", b"test")
    assert (tmp_path / "tests" / "deep" / "hidden.py").read_bytes() == b"test"
    with pytest.raises(WorkspaceError) as caught:
        await tests.read("../root/run.sh")
    assert caught.value.fault is PathFault.OUTSIDE


async def _refuse(command: str, timeout_s: float) -> ExecResult:
    raise AssertionError(f"no command should run: {command} {timeout_s}")
