"""Every workspace answers alike: the same operations give the same results and the same faults."""

import asyncio
import contextlib
import hashlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.vm import guests

from etude.agent.patterns import GrepQuery, PatternError
from etude.agent.workspace import (
    MAX_FILE_BYTES,
    ExecResult,
    FileInfo,
    FileKind,
    FolderWorkspace,
    MemoryWorkspace,
    PathFault,
    Workspace,
    WorkspaceError,
)
from etude.envserver.guest.workspace import GuestWorkspace

FILES = {
    "shop/core.py": b"def add(a, b):\n    return a + b\n",
    "shop/__init__.py": b"",
    "notes.md": b"add\r\nADD\n",
    ".hidden/secret.py": b"add\n",
    "picture.png": b"\x89PNG\0add",
}


async def echo(command: str, timeout_s: float) -> ExecResult:
    return ExecResult(output=f"{command} {timeout_s:g}".encode(), exit_code=3, cpu_ms=7)


@pytest.fixture(params=["memory", "folder", *guests.AGENTS])
async def workspace(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Workspace]:
    root = tmp_path / "root"
    root.mkdir()
    async with _made(request.param, root) as made:
        for path, data in FILES.items():
            await made.write(path, data)
        yield made


@contextlib.asynccontextmanager
async def _made(kind: str, root: Path) -> AsyncIterator[Workspace]:
    match kind:
        case "memory":
            yield MemoryWorkspace({}, echo)
        case "folder":
            yield FolderWorkspace(root, echo)
        case agent:
            async with guests.guest(agent, root) as guest:
                yield GuestWorkspace(guest.channel, echo)


async def fault(call: Awaitable[object]) -> PathFault:
    with pytest.raises(WorkspaceError) as caught:
        await call
    return caught.value.fault


async def test_what_is_written_is_read_back(workspace: Workspace) -> None:
    await workspace.write("deep/er/new.txt", b"\x00\xff")
    assert await workspace.read("deep/er/new.txt") == b"\x00\xff"
    await workspace.write("deep/er/new.txt", b"")
    assert await workspace.read("deep/er/new.txt") == b""


async def test_paths_of_one_file_are_the_same_file(workspace: Workspace) -> None:
    for path in ("./shop/core.py", "shop//core.py", "shop/x/../core.py", "/workspace/shop/core.py"):
        assert await workspace.read(path) == FILES["shop/core.py"]
        assert (await workspace.stat(path)).path == "shop/core.py"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("../etc/passwd", PathFault.OUTSIDE),
        ("shop/../../x", PathFault.OUTSIDE),
        ("/etc/passwd", PathFault.OUTSIDE),
        ("/workspace/../etc/passwd", PathFault.OUTSIDE),
        ("/workspaces/x", PathFault.OUTSIDE),
        ("a\0b", PathFault.BAD_NAME),
        ("\ud800", PathFault.BAD_NAME),
        ("x" * 256, PathFault.BAD_NAME),
        ("x/" * 600, PathFault.BAD_NAME),
        ("missing", PathFault.NO_SUCH_FILE),
        ("missing/file", PathFault.NO_SUCH_FILE),
        ("notes.md/file", PathFault.NOT_A_FOLDER),
        ("shop", PathFault.IS_A_FOLDER),
        ("", PathFault.IS_A_FOLDER),
        ("/workspace", PathFault.IS_A_FOLDER),
    ],
)
async def test_a_bad_path_is_named_by_its_fault(
    workspace: Workspace, path: str, expected: PathFault
) -> None:
    assert await fault(workspace.read(path)) is expected
    assert await fault(workspace.delete(path)) is expected
    if expected is not PathFault.NO_SUCH_FILE:
        assert await fault(workspace.write(path, b"x")) is expected


async def test_a_folder_is_listed_in_bytewise_order(workspace: Workspace) -> None:
    assert await workspace.list("") == [
        FileInfo(".hidden", FileKind.FOLDER, 0),
        FileInfo("notes.md", FileKind.FILE, 9),
        FileInfo("picture.png", FileKind.FILE, 8),
        FileInfo("shop", FileKind.FOLDER, 0),
    ]
    assert [info.path for info in await workspace.list("shop")] == [
        "shop/__init__.py",
        "shop/core.py",
    ]
    assert await fault(workspace.list("notes.md")) is PathFault.NOT_A_FOLDER


async def test_a_folder_outlives_its_last_file(workspace: Workspace) -> None:
    await workspace.delete("shop/core.py")
    await workspace.delete("shop/__init__.py")
    assert await workspace.list("shop") == []
    assert await fault(workspace.write("shop", b"x")) is PathFault.IS_A_FOLDER


async def test_a_file_above_the_limit_is_not_written(workspace: Workspace) -> None:
    assert await fault(workspace.write("big", bytes(MAX_FILE_BYTES + 1))) is PathFault.TOO_LARGE
    await workspace.write("big", bytes(MAX_FILE_BYTES))
    assert len(await workspace.read("big")) == MAX_FILE_BYTES


async def test_globs_leave_out_hidden_names_unless_they_name_them(workspace: Workspace) -> None:
    assert await workspace.glob("**/*.py") == ["shop/__init__.py", "shop/core.py"]
    assert await workspace.glob(".hidden/*.py") == [".hidden/secret.py"]
    assert await workspace.glob("*.py") == []


async def test_grep_finds_lines_in_text_files_only(workspace: Workspace) -> None:
    found = await workspace.grep(GrepQuery(pattern="a[d]d"))
    assert [(file.path, file.num_matches) for file in found] == [
        ("notes.md", 1),
        ("shop/core.py", 1),
    ]
    assert found[0].lines[0].text == "add"


async def test_hashes_are_of_what_can_be_read_and_is_not_hidden(workspace: Workspace) -> None:
    await workspace.write("shop/.cache/x", b"hidden")
    assert await workspace.hashes() == {
        path: hashlib.sha256(data).digest()
        for path, data in FILES.items()
        if not path.startswith(".")
    }
    await workspace.delete("notes.md")
    await workspace.write("shop/core.py", b"")
    found = await workspace.hashes()
    assert "notes.md" not in found
    assert found["shop/core.py"] == hashlib.sha256(b"").digest()


async def test_grep_starts_at_a_file_or_a_folder(workspace: Workspace) -> None:
    inside = await workspace.grep(GrepQuery(pattern="add", path="./shop"))
    assert [file.path for file in inside] == ["shop/core.py"]
    alone = await workspace.grep(GrepQuery(pattern="add", path=".hidden/secret.py"))
    assert [file.path for file in alone] == [".hidden/secret.py"]
    assert await fault(workspace.grep(GrepQuery(pattern="a", path="no"))) is PathFault.NO_SUCH_FILE


@pytest.mark.parametrize("pattern", ["(", "a**", r"\1", "(?=x)"])
async def test_a_pattern_that_does_not_parse_is_an_error(
    workspace: Workspace, pattern: str
) -> None:
    with pytest.raises(PatternError):
        await workspace.grep(GrepQuery(pattern=pattern))


async def test_a_command_goes_to_the_runner(workspace: Workspace) -> None:
    done = await workspace.exec("pytest", timeout_s=5)
    assert done == ExecResult(output=b"pytest 5", exit_code=3, cpu_ms=7)


segments = st.sampled_from(["a", "b", "é", ".c", ".."])
paths = st.lists(segments, max_size=3).map("/".join)
operations = st.one_of(
    st.tuples(st.just("write"), paths, st.sampled_from([b"", b"x\ny\n", b"\0"])),
    st.tuples(st.sampled_from(["read", "stat", "list", "delete"]), paths),
    st.tuples(
        st.just("glob"), st.sampled_from(["*", "**", "a/*", "**/b", ".*/**", "[ab]", "{a,é}"])
    ),
    st.tuples(
        st.just("grep"), st.builds(GrepQuery, pattern=st.sampled_from(["x", "y$"]), path=paths)
    ),
)


async def outcome(workspace: Workspace, operation: Sequence[object]) -> object:
    method: Callable[..., Awaitable[object]] = getattr(workspace, str(operation[0]))
    try:
        return await method(*operation[1:])
    except WorkspaceError as error:
        return error.fault


@given(st.lists(operations, max_size=25))
def test_memory_and_folder_cannot_be_told_apart(script: list[tuple[object, ...]]) -> None:
    async def compare() -> None:
        memory = MemoryWorkspace({}, echo)
        with tempfile.TemporaryDirectory() as root:
            folder = FolderWorkspace(Path(root), echo)
            for operation in script:
                ours, theirs = [await outcome(each, operation) for each in (memory, folder)]
                assert ours == theirs, operation

    asyncio.run(compare())


async def words(workspace: Workspace, operation: Sequence[object]) -> object:
    """The outcome, with the very words that the policy reads."""
    method: Callable[..., Awaitable[object]] = getattr(workspace, str(operation[0]))
    try:
        return await method(*operation[1:])
    except WorkspaceError as error:
        return str(error)


@pytest.mark.parametrize("agent", guests.AGENTS)
def test_folder_and_guest_cannot_be_told_apart(agent: str, tmp_path: Path) -> None:
    with guests.running((agent,), tmp_path) as run:

        @given(st.lists(operations, max_size=25))
        def check(script: list[tuple[object, ...]]) -> None:
            async def compare(made: dict[str, guests.Guest]) -> None:
                with tempfile.TemporaryDirectory() as ours, tempfile.TemporaryDirectory() as theirs:
                    folder = FolderWorkspace(Path(ours), echo)
                    guest = GuestWorkspace(made[agent].channel, echo, cwd=theirs)
                    for operation in script:
                        ours_says, theirs_says = [
                            await words(each, operation) for each in (folder, guest)
                        ]
                        assert ours_says == theirs_says, operation

            run(compare)

        check()
