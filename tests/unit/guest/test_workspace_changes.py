"""Archives unpacked in a guest, and the changes that it finds, against what git says."""

import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from tests.support.vm import guests

from etude.agent.workspace import WorkspaceLostError
from etude.envserver.guest import workspace_files
from etude.envserver.guest.calls import GuestRequest
from etude.envserver.guest.channel import GuestChannel
from etude.envserver.storage import base_files, folders
from etude.envserver.storage.folders import FolderLimits, TooLargeError
from etude.envserver.storage.trees import File
from etude.v1 import environments_pb2, guest_pb2

ROOMY = FolderLimits(max_files=1000, max_bytes=1 << 22)
IGNORED = """\
# build output
*.o
!kept.o
/target/
node_modules
docs/**/*.html
a/**/z
[!a-y]?.tmp
\\#odd
trailing\\ 
build/
!build/
"""  # noqa: W291 - an escaped space at the end of a line


def git(root: Path, *words: str) -> bytes:
    return subprocess.run(
        ("git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b", *words),
        check=True,
        capture_output=True,
    ).stdout


def fill(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository as an image holds it, with build output that its rules ignore."""
    folder = tmp_path / "root"
    fill(
        folder,
        {
            ".gitignore": IGNORED,
            "src/main.c": "int main;\n",
            "src/run.sh": "run\n",
            "a/keep": "",
            "target/old.bin": "built\n",
            "target/tracked.txt": "tracked, though ignored\n",
            "x-y/z": "sorted between\n",
            "x/z": "and after\n",
            "x.txt": "in bytes\n",
        },
    )
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "add", "-f", "target/tracked.txt")
    git(folder, "commit", "-qm", "first")
    return folder


@pytest.fixture(params=guests.AGENTS)
async def channel(request: pytest.FixtureRequest, root: Path) -> AsyncIterator[GuestChannel]:
    async with guests.guest(request.param, root) as guest:
        yield guest.channel


def base_of(root: Path) -> bytes:
    tracked = git(root, "ls-files", "-z").decode().split("\0")
    return base_files.encode_base(base_files.list_folder(root, tracked=tracked))


def by_git(root: Path) -> tuple[set[str], set[str]]:
    """What git says was written, and was deleted."""
    changed = git(root, "diff", "--name-only", "--diff-filter=d", "-z", "HEAD")
    deleted = git(root, "diff", "--name-only", "--diff-filter=D", "--no-renames", "-z", "HEAD")
    new = git(root, "ls-files", "--others", "--exclude-standard", "-z")
    return {*(changed + new).decode().split("\0")} - {""}, {*deleted.decode().split("\0")} - {""}


def names(diff: environments_pb2.WorkspaceDiff) -> tuple[set[str], set[str]]:
    return {each.path for each in diff.written}, set(diff.deleted)


async def test_the_change_is_what_git_says(channel: GuestChannel, root: Path) -> None:
    base = base_of(root)
    assert names(await workspace_files.workspace_change(channel, base, ROOMY)) == (set(), set())
    fill(
        root,
        {
            "src/main.c": "int changed;\n",
            "src/new.c": "new\n",
            "src/new.o": "ignored\n",
            "src/kept.o": "not ignored\n",
            "sub/target/x": "not anchored here\n",
            "node_modules/left/pad.js": "ignored\n",
            "deep/node_modules/pad.js": "ignored\n",
            "docs/a/b/c.html": "ignored\n",
            "docs/c.html": "ignored\n",
            "docs/c.htm": "new\n",
            "a/b/c/z": "ignored\n",
            "a/z": "ignored\n",
            "a/zz": "new\n",
            "z1.tmp": "ignored\n",
            "a1.tmp": "new\n",
            "#odd": "ignored\n",
            "trailing ": "ignored\n",
            "build/x": "not ignored in the end\n",
            "deep/.gitignore": "*.log\n!keep.log\n",
            "deep/x.log": "ignored\n",
            "deep/keep.log": "new\n",
            "target/tracked.txt": "changed\n",
            "target/new.txt": "ignored\n",
        },
    )
    (root / "src/run.sh").chmod(0o755)
    (root / "x/z").unlink()
    found = await workspace_files.workspace_change(channel, base, ROOMY)
    assert names(found) == by_git(root)
    assert {e.path: (e.content, e.executable) for e in found.written}["src/run.sh"] == (
        b"run\n",
        True,
    )


async def test_a_folder_in_place_of_a_file_and_the_reverse(
    channel: GuestChannel, root: Path
) -> None:
    base = base_of(root)
    shutil.rmtree(root / "src")
    (root / "src").write_text("a file\n")
    (root / "x.txt").unlink()
    fill(root, {"x.txt/inner": "a folder\n"})
    (root / "x/z").unlink()
    (root / "x/z").symlink_to("/etc/passwd")
    shutil.rmtree(root / "target")
    found = await workspace_files.workspace_change(channel, base, ROOMY)
    assert names(found) == (
        {"src", "x.txt/inner"},
        {"src/main.c", "src/run.sh", "x.txt", "x/z", "target/tracked.txt"},
    )


async def test_the_policys_repository_decides_nothing(channel: GuestChannel, root: Path) -> None:
    base = base_of(root)
    fill(
        root,
        {
            ".git/info/exclude": "*\n",
            ".git/hooks/post-checkout": "exit 1\n",
            "src/main.c": "int changed;\n",
            "nested/.git/config": "[core]\n\tworktree = /\n",
            "nested/file": "new\n",
        },
    )
    git(root, "commit", "-qam", "hidden")
    found = await workspace_files.workspace_change(channel, base, ROOMY)
    assert names(found) == ({"src/main.c", "nested/file"}, set())


async def test_a_file_of_the_same_size_and_another_time_is_read(
    channel: GuestChannel, root: Path
) -> None:
    base = base_of(root)
    (root / "x.txt").write_text("IN BYTES\n")
    os.utime(root / "src/main.c", ns=(1, 1))
    found = await workspace_files.workspace_change(channel, base, ROOMY)
    assert [(each.path, each.content) for each in found.written] == [("x.txt", b"IN BYTES\n")]


@pytest.mark.parametrize("limits", [FolderLimits(2, 1 << 20), FolderLimits(100, 10)])
async def test_more_than_the_limits_is_an_error_and_no_empty_change(
    channel: GuestChannel, root: Path, limits: FolderLimits
) -> None:
    base = base_of(root)
    fill(root, {f"new/{number}": "some text\n" for number in range(3)})
    with pytest.raises(TooLargeError):
        await workspace_files.workspace_change(channel, base, limits)


async def test_an_archive_replaces_what_is_in_the_way(channel: GuestChannel, root: Path) -> None:
    (root / "link").symlink_to("/nonexistent")
    tree = {
        "src": File(b"a file now\n"),
        "x.txt/inner": File(b"a folder now\n", executable=True),
        "link/inside": File(b"no link any more\n"),
        "a/" + "long" * 50 + "/name": File(b"long\n"),
        "large": File(os.urandom(700_000)),
        "empty": File(b""),
        "é": File(b"text\n"),
    }
    await workspace_files.write_tree(
        channel, tree, root=str(root), deleted=["x/z", "x/absent", "x-y/z"]
    )
    shutil.rmtree(root / ".git")
    found = folders.read_tree(root, ROOMY).tree
    assert {path: found[path] for path in tree} == tree
    assert not (root / "x").exists()
    assert not (root / "x-y").exists()
    assert "a/keep" in found


def entry(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, target
    return made


@pytest.mark.parametrize(
    ("hostile", "named"),
    [
        (entry("link", tarfile.SYMTYPE, "/etc"), "link"),
        (entry("hard", tarfile.LNKTYPE, "src/main.c"), "hard"),
        (entry("disk", tarfile.BLKTYPE), "disk"),
        (entry("tty", tarfile.CHRTYPE), "tty"),
        (entry("pipe", tarfile.FIFOTYPE), "pipe"),
        (entry("/etc/passwd"), "/etc/passwd"),
        (entry("a/../../escaped"), "escaped"),
        (entry("a/./b" * 60), "a/./b"),
    ],
)
async def test_a_hostile_archive_is_refused_by_name(
    root: Path, hostile: tarfile.TarInfo, named: str
) -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(hostile)
    async with guests.guest("go", root) as guest:
        reply = await apply(guest.channel, data.getvalue())
        assert reply.status == guest_pb2.GUEST_STATUS_INVALID
        assert named in reply.message
    assert not (root.parent / "escaped").exists()


async def apply(channel: GuestChannel, archive: bytes) -> guest_pb2.GuestResult:
    call = guest_pb2.GuestCall(apply=guest_pb2.GuestApply(has_archive=True))
    request = GuestRequest(operation=call, data=archive, deadline_s=60)
    return (await channel.call(request)).result


def cut(data: bytes) -> bytes:
    return data[:1000]


def no_size(data: bytes) -> bytes:
    return data[:124] + b"7" * 11 + data[135:]


def huge_size(data: bytes) -> bytes:
    return _summed(data[:124] + b"77777777777\0" + data[136:])


def _summed(data: bytes) -> bytes:
    head = data[:148] + b" " * 8 + data[156:512]
    return data[:148] + b"%06o\0 " % sum(head) + data[156:]


@pytest.mark.parametrize("damage", [cut, no_size, huge_size])
async def test_a_damaged_archive_is_refused(root: Path, damage: Callable[[bytes], bytes]) -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.PAX_FORMAT) as archive:
        made = entry("file")
        made.size = 1000
        archive.addfile(made, io.BytesIO(b"x" * 1000))
    async with guests.guest("go", root) as guest:
        reply = await apply(guest.channel, damage(data.getvalue()))
        assert reply.status == guest_pb2.GUEST_STATUS_INVALID
        with pytest.raises(WorkspaceLostError):
            await workspace_files.write_tree(guest.channel, {}, root=str(root), deleted=["../x"])


async def test_a_hostile_ignore_file_costs_bounded_time(root: Path) -> None:
    base = base_of(root)
    fill(root, {".gitignore": ("*a" * 2000 + "b\n") * 50, "a" * 200: "new\n"})
    async with guests.guest("go", root) as guest:
        found = await workspace_files.workspace_change(guest.channel, base, ROOMY)
    assert "a" * 200 in names(found)[0]


async def test_gigabytes_that_are_ignored_or_unchanged_are_not_read(root: Path) -> None:
    for name in ("large.bin", "target/tracked.bin"):
        (root / name).write_bytes(bytes(1 << 20))
    git(root, "add", "-f", "large.bin", "target/tracked.bin")
    base = base_of(root)
    for number in range(4):
        (root / "target" / f"{number}.bin").touch()
        os.truncate(root / "target" / f"{number}.bin", 512 << 20)
    fill(root, {"src/main.c": "int changed;\n"})
    async with guests.guest("go", root) as guest:
        # Reads of the base's list, and of the one file that was written.
        before = bytes_read(guest.process.pid)
        found = await workspace_files.workspace_change(guest.channel, base, ROOMY)
        assert bytes_read(guest.process.pid) - before < 256 << 10
    assert names(found) == ({"src/main.c"}, set())


def bytes_read(pid: int) -> int:
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])
