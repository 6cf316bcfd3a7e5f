"""RPCs on the files and programs of one environment, for the holder of its control token."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import grpc
from typing_extensions import override

from etude.agent.workspace import (
    MAX_FILE_BYTES,
    FileInfo,
    FileKind,
    PathFault,
    WorkspaceError,
    relative_path,
)
from etude.common.errors import InvalidFieldError, UnknownIdError
from etude.common.rpc import channels
from etude.common.tls.policy import AuthenticatedCall
from etude.envserver.drivers import programs
from etude.envserver.drivers.base import Sandbox
from etude.envserver.drivers.programs import OutputStream, Program, RunningProgram, TerminalSize
from etude.envserver.host import controller_access
from etude.envserver.host.environment import LeasedEnvironment
from etude.envserver.host.host import Host
from etude.envserver.host.owned_leases import find_owned
from etude.v1 import environment_access_pb2 as pb2
from etude.v1 import environment_access_pb2_grpc

_KINDS = {
    FileKind.FILE: pb2.FILE_KIND_FILE,
    FileKind.FOLDER: pb2.FILE_KIND_FOLDER,
    FileKind.OTHER: pb2.FILE_KIND_OTHER,
}
_ENTRIES = 1_000
"""Entries in one message of a list."""
_MAX_SIGNAL = 64

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
Context = grpc.aio.ServicerContext[_Request, _Response]


class _OfLease(Protocol):
    """A request about one lease."""

    lease_id: str
    control_token: str


@dataclass(slots=True)
class AccessService(environment_access_pb2_grpc.EnvAccessServiceServicer):
    """Translates between the wire and an environment."""

    host: Host

    @override
    async def Exec(
        self,
        request_iterator: AsyncIterator[pb2.ExecRequest],
        context: Context[pb2.ExecRequest, pb2.ExecResponse],
    ) -> AsyncIterator[pb2.ExecResponse]:
        request = await anext(aiter(request_iterator), pb2.ExecRequest())
        if not request.HasField("open"):
            raise InvalidFieldError("open", "the first message says what to run")
        environment = self._find(request.open, context)
        async with environment.run_program(parse_program(request.open)) as running:
            started = pb2.ExecStarted(number=running.number)
            yield pb2.ExecResponse(started=started)
            feeder = asyncio.create_task(_feed(request_iterator, running), name="exec input")
            try:
                async for piece in running.output():
                    for response in _pieces(piece):
                        yield response
                ending = await running.wait()
            finally:
                feeder.cancel()
                await asyncio.wait([feeder])
            if not feeder.cancelled():
                feeder.result()
            yield pb2.ExecResponse(exit=pb2.ExecExit(**ending._asdict()))

    @override
    async def ReadFile(
        self,
        request: pb2.ReadFileRequest,
        context: Context[pb2.ReadFileRequest, pb2.ReadFileResponse],
    ) -> AsyncIterator[pb2.ReadFileResponse]:
        async with self._files(request, context) as sandbox:
            data = await sandbox.workspace.read(request.path)
        for chunk in channels.chunks(data):
            yield pb2.ReadFileResponse(chunk=chunk)

    @override
    async def WriteFile(
        self,
        request_iterator: AsyncIterator[pb2.WriteFileRequest],
        context: Context[pb2.WriteFileRequest, pb2.WriteFileResponse],
    ) -> pb2.WriteFileResponse:
        first = await anext(aiter(request_iterator), pb2.WriteFileRequest())
        self._find(first, context)
        data = bytearray(_check_chunk("chunk", first.chunk))
        async for request in request_iterator:
            data += _check_chunk("chunk", request.chunk)
            if len(data) > MAX_FILE_BYTES:
                raise WorkspaceError(PathFault.TOO_LARGE, first.path)
        async with self._files(first, context) as sandbox:
            await sandbox.workspace.write(first.path, bytes(data))
            info = await sandbox.workspace.stat(first.path)
        return pb2.WriteFileResponse(entry=_entry(info))

    @override
    async def StatFile(
        self,
        request: pb2.StatFileRequest,
        context: Context[pb2.StatFileRequest, pb2.StatFileResponse],
    ) -> pb2.StatFileResponse:
        async with self._files(request, context) as sandbox:
            info = await sandbox.workspace.stat(request.path)
        return pb2.StatFileResponse(entry=_entry(info))

    @override
    async def ListFiles(
        self,
        request: pb2.ListFilesRequest,
        context: Context[pb2.ListFilesRequest, pb2.ListFilesResponse],
    ) -> AsyncIterator[pb2.ListFilesResponse]:
        async with self._files(request, context) as sandbox:
            infos = await sandbox.workspace.list(request.path)
        for page in _pages(infos):
            yield pb2.ListFilesResponse(entries=[_entry(info) for info in page])

    @override
    async def MakeFolder(
        self,
        request: pb2.MakeFolderRequest,
        context: Context[pb2.MakeFolderRequest, pb2.MakeFolderResponse],
    ) -> pb2.MakeFolderResponse:
        async with self._files(request, context) as sandbox:
            is_new = await controller_access.make_folder(sandbox, request.path)
        return pb2.MakeFolderResponse(is_new=is_new)

    @override
    async def MoveFile(
        self,
        request: pb2.MoveFileRequest,
        context: Context[pb2.MoveFileRequest, pb2.MoveFileResponse],
    ) -> pb2.MoveFileResponse:
        async with self._files(request, context) as sandbox:
            info = await controller_access.move_path(sandbox, request.path, request.new_path)
        return pb2.MoveFileResponse(entry=_entry(info))

    @override
    async def RemoveFile(
        self,
        request: pb2.RemoveFileRequest,
        context: Context[pb2.RemoveFileRequest, pb2.RemoveFileResponse],
    ) -> pb2.RemoveFileResponse:
        async with self._files(request, context) as sandbox:
            await controller_access.remove_path(sandbox, request.path)
        return pb2.RemoveFileResponse()

    def _find(self, request: _OfLease, call: AuthenticatedCall) -> LeasedEnvironment:
        environment = find_owned(self.host, request.lease_id, call)
        environment.check_control(request.control_token)
        return environment

    @contextlib.asynccontextmanager
    async def _files(self, request: _OfLease, call: AuthenticatedCall) -> AsyncIterator[Sandbox]:
        """The files of a lease, between two turns.

        Raises:
            UnknownIdError: the lease is not here, or a name is not there.
        """
        async with self._find(request, call).open_files() as sandbox:
            with _translate_missing():
                yield sandbox


def parse_program(request: pb2.ExecOpen) -> Program:
    """Parse the program that a client wants to run.

    Raises:
        InvalidFieldError: naming the field that is wrong.
    """
    argv = ["/bin/sh", "-c", request.shell] if request.shell else list(request.argv.arguments)
    if not argv or not argv[0]:
        raise InvalidFieldError("command", "is empty")
    _check_words("command", argv)
    timeout_s = request.timeout_seconds or programs.DEFAULT_TIMEOUT_S
    if timeout_s > programs.MAX_TIMEOUT_S:
        raise InvalidFieldError("timeout_seconds", f"at most {programs.MAX_TIMEOUT_S}")
    env = dict(request.env)
    _check_words("env", [word for pair in env.items() for word in pair])
    if any(not name or "=" in name for name in env):
        raise InvalidFieldError("env", "a name is empty or holds an =")
    if sum(len(n.encode()) + len(v.encode()) for n, v in env.items()) > (
        programs.MAX_ENVIRONMENT_BYTES
    ):
        raise InvalidFieldError("env", f"more than {programs.MAX_ENVIRONMENT_BYTES >> 10} KiB")
    return Program(
        argv=argv,
        cwd=relative_path(request.cwd),
        env=env,
        timeout_s=timeout_s,
        terminal=_size("terminal", request.terminal) if request.HasField("terminal") else None,
    )


def _check_words(field: str, words: Sequence[str]) -> None:
    if any("\0" in word for word in words):
        raise InvalidFieldError(field, "holds a NUL character")


def _size(field: str, size: pb2.TerminalSize) -> TerminalSize:
    if not (0 < size.rows <= programs.MAX_TERMINAL and 0 < size.columns <= programs.MAX_TERMINAL):
        raise InvalidFieldError(field, f"rows and columns are 1 to {programs.MAX_TERMINAL}")
    return TerminalSize(size.rows, size.columns)


async def _feed(requests: AsyncIterator[pb2.ExecRequest], running: RunningProgram) -> None:
    """Pass a client's steps on; an invalid one ends the program, and then the call.

    Raises:
        InvalidFieldError: a step is invalid.
    """
    try:
        async for request in requests:
            await _step(request, running)
        running.close_input()
    except InvalidFieldError:
        running.kill()
        raise


async def _step(request: pb2.ExecRequest, running: RunningProgram) -> None:
    match request.WhichOneof("step"):
        case "stdin":
            await running.write(_check_chunk("stdin", request.stdin))
        case "close_stdin":
            running.close_input()
        case "signal" if 0 < request.signal <= _MAX_SIGNAL:
            running.signal(request.signal)
        case "resize":
            running.resize(_size("resize", request.resize))
        case other:
            raise InvalidFieldError(str(other or "step"), "is not a step of a running program")


def _check_chunk(field: str, data: bytes) -> bytes:
    """Check the size of a piece of a stream; returns it.

    Raises:
        InvalidFieldError: it is larger.
    """
    if len(data) > channels.CHUNK_BYTES:
        raise InvalidFieldError(field, f"{len(data)} bytes in one message, more than 1 MiB")
    return data


def _pieces(piece: programs.OutputPiece) -> Iterator[pb2.ExecResponse]:
    for chunk in channels.chunks(piece.data):
        if piece.stream is OutputStream.OUT:
            yield pb2.ExecResponse(stdout=chunk)
        else:
            yield pb2.ExecResponse(stderr=chunk)


def _entry(info: FileInfo) -> pb2.FileEntry:
    return pb2.FileEntry(path=info.path, kind=_KINDS[info.kind], size=info.size)


def _pages(infos: Sequence[FileInfo]) -> Iterator[Sequence[FileInfo]]:
    for start in range(0, len(infos), _ENTRIES):
        yield infos[start : start + _ENTRIES]


@contextlib.contextmanager
def _translate_missing() -> Iterator[None]:
    """Turn a missing file into an unknown id; other errors of a path stay.

    Raises:
        UnknownIdError: it is not there.
        WorkspaceError: it cannot be used.
    """
    try:
        yield
    except WorkspaceError as error:
        if error.fault is PathFault.NO_SUCH_FILE:
            raise UnknownIdError(str(error)) from error
        raise
