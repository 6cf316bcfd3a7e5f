"""Files of a sandbox over envd's API: list, move, upload and download."""

import contextlib
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from etude.agent.workspace import MAX_FILE_BYTES, PathFault, WorkspaceError
from etude.common.errors import InvalidFieldError, ReusedIdError
from etude.common.rpc import channels
from etude.envserver.environment_api.e2b import connect_protocol
from etude.envserver.environment_api.e2b.client_paths import client_path, workspace_path
from etude.envserver.environment_api.e2b.connect_protocol import Json
from etude.envserver.environment_api.pool_client import PoolClient
from etude.envserver.environment_api.sandboxes import ClientSandbox
from etude.v1 import environment_access_pb2 as pb2

MAX_FILES = 100
"""In one upload."""
_MAX_DEPTH = 20
_MAX_LISTED = 10_000
"""Entries of one listing, of any depth."""
_DEADLINE_S = 90.0
_KINDS = {
    pb2.FILE_KIND_FILE: "FILE_TYPE_FILE",
    pb2.FILE_KIND_FOLDER: "FILE_TYPE_DIRECTORY",
    pb2.FILE_KIND_OTHER: "FILE_TYPE_SYMLINK",
}


class EnvdFiles:
    """The files of one sandbox."""

    def __init__(self, pool: PoolClient, sandbox: ClientSandbox) -> None:
        """Prepare the calls.

        Args:
            pool: where the sandbox is from.
            sandbox: whose files these are.
        """
        self._access = pool.access_stub(sandbox.lease)
        self._key = {
            "lease_id": sandbox.lease.lease_id,
            "control_token": sandbox.lease.control_token,
        }

    async def call(self, method: str, request: Request) -> Response:
        """Answer one RPC of filesystem.Filesystem."""
        answer = self._methods.get(method)
        content = await connect_protocol.read_message(request)
        if answer is None:
            message = f"no filesystem.{method[:80]}"
            return connect_protocol.error_response({"code": "unimplemented", "message": message})
        return JSONResponse(await answer(content))

    async def download(self, path: str) -> bytes:
        """Read a whole file."""
        request = pb2.ReadFileRequest(**self._key, path=workspace_path(path))
        chunks = [
            piece.chunk async for piece in self._access.ReadFile(request, timeout=_DEADLINE_S)
        ]
        return b"".join(chunks)

    async def upload(self, request: Request) -> list[Json]:
        """Write the files of a request.

        Raises:
            InvalidFieldError: it has none, or no path.
        """
        path = request.query_params.get("path", "")
        if request.headers.get("content-type", "").startswith("multipart/form-data"):
            async with request.form(max_files=MAX_FILES, max_fields=1) as form:
                files = [each for each in form.getlist("file") if isinstance(each, UploadFile)]
                if not files or (path and len(files) > 1):
                    raise InvalidFieldError("file", "the form names no file, or more than the path")
                return [
                    await self._write(path or file.filename or "", await file.read())
                    for file in files
                ]
        body = await request.body()
        if request.headers.get("content-encoding", "identity") == "gzip":
            body = _decompress(body, path)
        return [await self._write(path, body)]

    async def _write(self, path: str, data: bytes) -> Json:
        if not workspace_path(path):
            raise InvalidFieldError("path", "names no file")
        requests = [
            pb2.WriteFileRequest(**self._key, path=workspace_path(path), chunk=chunk)
            for chunk in channels.chunks(data)
        ]
        answer = await self._access.WriteFile(iter(requests), timeout=_DEADLINE_S)
        entry = _entry(answer.entry, like=path)
        return {"name": entry["name"], "type": "file", "path": entry["path"]}

    @property
    def _methods(self) -> Mapping[str, Callable[[Json], Awaitable[Json]]]:
        return {
            "Stat": self._stat,
            "ListDir": self._list,
            "MakeDir": self._make,
            "Move": self._move,
            "Remove": self._remove,
        }

    async def _stat(self, content: Json) -> Json:
        path = connect_protocol.text_field(content, "path")
        request = pb2.StatFileRequest(**self._key, path=workspace_path(path))
        answer = await self._access.StatFile(request, timeout=_DEADLINE_S)
        return {"entry": _entry(answer.entry, like=path)}

    async def _list(self, content: Json) -> Json:
        path = connect_protocol.text_field(content, "path")
        depth = connect_protocol.number_field(content, "depth", most=_MAX_DEPTH) or 1
        entries: list[Json] = []
        level = [workspace_path(path)]
        while level and depth:
            folders, level = level, []
            for folder in folders:
                async with contextlib.aclosing(self._folder(folder)) as found:
                    async for entry in found:
                        if len(entries) >= _MAX_LISTED:
                            raise WorkspaceError(PathFault.TOO_MANY, path)
                        entries.append(_entry(entry, like=path))
                        level += [entry.path] if entry.kind == pb2.FILE_KIND_FOLDER else []
            depth -= 1
        return {"entries": sorted(entries, key=lambda entry: str(entry["path"]))}

    async def _folder(self, path: str) -> AsyncGenerator[pb2.FileEntry, None]:
        request = pb2.ListFilesRequest(**self._key, path=path)
        call = self._access.ListFiles(request, timeout=_DEADLINE_S)
        try:
            async for page in call:
                for entry in page.entries:
                    yield entry
        finally:
            call.cancel()

    async def _make(self, content: Json) -> Json:
        path = connect_protocol.text_field(content, "path")
        request = pb2.MakeFolderRequest(**self._key, path=workspace_path(path))
        answer = await self._access.MakeFolder(request, timeout=_DEADLINE_S)
        if not answer.is_new:
            raise ReusedIdError(
                f"directory already exists: {client_path(workspace_path(path), like=path)}"
            )
        entry = pb2.FileEntry(path=workspace_path(path), kind=pb2.FILE_KIND_FOLDER)
        return {"entry": _entry(entry, like=path)}

    async def _move(self, content: Json) -> Json:
        path, to = (
            connect_protocol.text_field(content, "source"),
            connect_protocol.text_field(content, "destination"),
        )
        request = pb2.MoveFileRequest(
            **self._key, path=workspace_path(path), new_path=workspace_path(to)
        )
        answer = await self._access.MoveFile(request, timeout=_DEADLINE_S)
        return {"entry": _entry(answer.entry, like=to)}

    async def _remove(self, content: Json) -> Json:
        path = connect_protocol.text_field(content, "path")
        request = pb2.RemoveFileRequest(**self._key, path=workspace_path(path))
        await self._access.RemoveFile(request, timeout=_DEADLINE_S)
        return {}


def _entry(entry: pb2.FileEntry, *, like: str) -> dict[str, Any]:
    """An entry in envd's form. Owner and modes are the same for every file here."""
    is_folder = entry.kind == pb2.FILE_KIND_FOLDER
    return {
        "name": entry.path.rpartition("/")[2] or client_path("", like=like).rpartition("/")[2],
        "type": _KINDS[entry.kind],
        "path": client_path(entry.path, like=like),
        "size": str(entry.size),
        "mode": 0o755 if is_folder else 0o644,
        "permissions": "drwxr-xr-x" if is_folder else "-rw-r--r--",
        "owner": "user",
        "group": "user",
    }


def _decompress(body: bytes, path: str) -> bytes:
    """Decompress a gzip stream, up to the largest size of a file.

    Raises:
        InvalidFieldError: it is not a gzip stream.
        WorkspaceError: it is larger.
    """
    unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        data = unpacker.decompress(body, MAX_FILE_BYTES + 1)
    except zlib.error as error:
        raise InvalidFieldError("body", "is not a gzip stream") from error
    if len(data) > MAX_FILE_BYTES:
        raise WorkspaceError(PathFault.TOO_LARGE, path)
    if not unpacker.eof:
        raise InvalidFieldError("body", "is a truncated gzip stream")
    return data
