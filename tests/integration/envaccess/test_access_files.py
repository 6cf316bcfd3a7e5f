"""Files that a lease's controller reads, writes, moves and removes."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from etude.v1 import environment_access_pb2 as pb2

Door = Any  # the fixture's class lives in conftest, which test modules cannot import
Refusal = Callable[[Any], Any]

FILE, FOLDER, OTHER = pb2.FILE_KIND_FILE, pb2.FILE_KIND_FOLDER, pb2.FILE_KIND_OTHER


def seen(entries: Any) -> list[tuple[str, int, int]]:
    return [(entry.path, entry.kind, entry.size) for entry in entries]


async def test_a_file_comes_back_as_it_was_written(door: Door) -> None:
    data = bytes(range(256)) * 10_000  # three chunks

    entry = await door.write("deep/er/file.bin", data)

    assert seen([entry]) == [("deep/er/file.bin", FILE, len(data))]
    assert await door.read("deep/er/file.bin") == data
    assert await door.read("/workspace/deep/er/file.bin") == data
    assert (await door.run("id -u; stat -c %u deep/er/file.bin")).out == b"1000\n1000\n"


async def test_a_chunk_of_a_file_that_is_larger_than_the_wire_has_is_refused(
    door: Door, refusal: Refusal
) -> None:
    request = pb2.WriteFileRequest(**door.key, path="big", chunk=b"x" * ((1 << 20) + 1))

    refused = door.access.WriteFile(iter([request]))

    assert await refusal(refused) is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_empty_file_is_a_file(door: Door) -> None:
    await door.write("empty", b"")

    assert await door.read("empty") == b""


async def test_a_folder_shows_all_names_sorted(door: Door) -> None:
    await door.write(".hidden", b"x")
    await door.run("ln -s notes.txt link")

    assert seen(await door.list()) == [
        (".hidden", FILE, 1),
        ("link", OTHER, 0),
        ("notes.txt", FILE, 6),
        ("shop", FOLDER, 0),
    ]
    assert seen(await door.list("shop")) == [("shop/core.py", FILE, 32)]


async def test_a_folder_of_many_names_comes_in_pages(door: Door) -> None:
    await door.run("mkdir many; cd many; seq 2500 | xargs touch")

    assert len(await door.list("many")) == 2500


async def test_folders_are_made_once(door: Door) -> None:
    request = pb2.MakeFolderRequest(**door.key, path="a/b c/-d")

    assert (await door.access.MakeFolder(request)).is_new
    assert not (await door.access.MakeFolder(request)).is_new
    assert seen(await door.list("a/b c")) == [("a/b c/-d", FOLDER, 0)]


async def test_a_file_moves_with_its_content_and_replaces_what_is_there(door: Door) -> None:
    await door.write("old", b"new content")

    move = pb2.MoveFileRequest(**door.key, path="notes.txt", new_path="to/there.txt")
    assert seen([(await door.access.MoveFile(move)).entry]) == [("to/there.txt", FILE, 6)]
    move = pb2.MoveFileRequest(**door.key, path="old", new_path="to/there.txt")
    await door.access.MoveFile(move)

    assert await door.read("to/there.txt") == b"new content"
    assert [e.path for e in await door.list()] == ["shop", "to"]


async def test_a_folder_that_stands_in_the_way_is_not_moved_into(
    door: Door, refusal: Refusal
) -> None:
    move = pb2.MoveFileRequest(**door.key, path="notes.txt", new_path="shop")

    assert await refusal(door.access.MoveFile(move)) is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_folder_is_removed_with_all_in_it(door: Door) -> None:
    await door.access.RemoveFile(pb2.RemoveFileRequest(**door.key, path="shop"))

    assert [e.path for e in await door.list()] == ["notes.txt"]


async def test_a_name_that_is_not_there_is_not_found(door: Door, refusal: Refusal) -> None:
    name = {**door.key, "path": "missing"}
    for attempt in (
        door.read("missing"),
        door.list("missing"),
        door.access.StatFile(pb2.StatFileRequest(**name)),
        door.access.RemoveFile(pb2.RemoveFileRequest(**name)),
        door.access.MoveFile(pb2.MoveFileRequest(**name, new_path="x")),
    ):
        assert await refusal(attempt) is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "a\0b", "x" * 300])
async def test_no_path_leads_out_of_the_workspace(door: Door, refusal: Refusal, path: str) -> None:
    name = {**door.key, "path": path}
    for attempt in (
        door.read(path),
        door.write(path, b"x"),
        door.list(path),
        door.access.StatFile(pb2.StatFileRequest(**name)),
        door.access.MakeFolder(pb2.MakeFolderRequest(**name)),
        door.access.RemoveFile(pb2.RemoveFileRequest(**name)),
        door.access.MoveFile(pb2.MoveFileRequest(**name, new_path="y")),
        door.access.MoveFile(pb2.MoveFileRequest(**{**name, "path": "notes.txt"}, new_path=path)),
    ):
        assert await refusal(attempt) is grpc.StatusCode.INVALID_ARGUMENT


async def test_no_link_leads_out_of_the_workspace(door: Door, refusal: Refusal) -> None:
    await door.run("ln -s /etc out; ln -s /etc/passwd file")

    for attempt in (door.read("file"), door.read("out/passwd"), door.list("out")):
        assert await refusal(attempt) is grpc.StatusCode.INVALID_ARGUMENT
    assert await refusal(door.write("out/x", b"")) is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_workspace_itself_stays(door: Door, refusal: Refusal) -> None:
    remove = pb2.RemoveFileRequest(**door.key, path=".")

    assert await refusal(door.access.RemoveFile(remove)) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_file_above_the_limit_is_refused_with_the_limit(door: Door) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await door.write("big", bytes((8 << 20) + 1))

    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "8 MiB" in str(caught.value.details())


async def test_what_is_written_counts_in_the_diff(door: Door) -> None:
    await door.write("shop/core.py", b"new")

    diff = await door.diff()

    assert [(file.path, file.content) for file in diff.written] == [("shop/core.py", b"new")]
