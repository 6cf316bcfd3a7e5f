"""Programs of a sandbox that outlive their listeners, and take new ones."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc

from etude.common.errors import FullError, UnknownIdError
from etude.v1 import environment_access_pb2 as pb2
from etude.v1 import environments_pb2

if TYPE_CHECKING:
    from etude.v1 import environment_access_pb2_grpc

MAX_LISTENERS = 16
_PIECES = 64
"""Pieces that wait for a listener; beyond that the program waits for it."""
_STALL_S = 30.0
"""A listener that takes nothing for this long is dropped; the program goes on."""

News = pb2.ExecResponse


@dataclass(slots=True, eq=False)
class SharedProgram:
    """One program and its listeners."""

    opened: pb2.ExecOpen
    tag: str
    number: int
    call: Any
    is_terminal: bool
    exit: pb2.ExecExit | None = None
    _listeners: set["asyncio.Queue[News | None]"] = field(default_factory=set)
    _sending: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def send(self, **step: Any) -> None:  # noqa: ANN401 - fields of the message
        """Give it input, a signal or a size.

        Raises:
            UnknownIdError: it has ended.
        """
        if self.exit is not None:
            raise UnknownIdError(f"process with pid {self.number} has ended")
        try:
            async with self._sending:  # gRPC takes one message at a time
                await self.call.write(pb2.ExecRequest(**step))
        except asyncio.InvalidStateError as error:
            raise UnknownIdError(f"process with pid {self.number} has ended") from error

    def subscribe(self) -> "asyncio.Queue[News | None]":
        """Add a listener; give the queue to listen().

        Raises:
            FullError: too many listen.
        """
        if len(self._listeners) >= MAX_LISTENERS:
            raise FullError(f"{MAX_LISTENERS} listen to this process", retry_after_s=5)
        queue: asyncio.Queue[News | None] = asyncio.Queue(_PIECES)
        self._listeners.add(queue)
        return queue

    async def listen(self, queue: "asyncio.Queue[News | None]") -> AsyncIterator[News]:
        """Messages of a queue, up to the program's exit."""
        try:
            while (news := await queue.get()) is not None:
                yield news
        finally:
            self._listeners.discard(queue)

    async def pump(self) -> None:
        """Pass its messages on to the listeners, up to its exit."""
        with contextlib.suppress(grpc.aio.AioRpcError):  # the sandbox is gone
            while isinstance(news := await self.call.read(), News):
                if news.HasField("exit"):
                    self.exit = news.exit
                await self._tell(news)
        self.exit = self.exit or pb2.ExecExit(exit_code=-1, ended_for="its sandbox")
        await self._tell(None)

    async def _tell(self, news: News | None) -> None:
        for queue in list(self._listeners):
            try:
                async with asyncio.timeout(_STALL_S):
                    await queue.put(news)
            except TimeoutError:
                self._listeners.discard(queue)
                # The dropped listener has to see its end.
                queue.get_nowait()
                queue.put_nowait(None)


class StartedProgram(NamedTuple):
    """A new program, and its first listener's queue."""

    program: SharedProgram
    queue: "asyncio.Queue[News | None]"


@dataclass(slots=True)
class SandboxPrograms:
    """All programs of one sandbox."""

    access: "environment_access_pb2_grpc.EnvAccessServiceAsyncStub"
    lease: environments_pb2.Lease
    _running: dict[int, SharedProgram] = field(default_factory=dict)
    _pumps: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self, opened: pb2.ExecOpen, tag: str) -> StartedProgram:
        """Start a program; it ends with its sandbox or with its own time.

        Raises:
            UnknownIdError: the sandbox has ended.
        """
        opened.lease_id, opened.control_token = self.lease.lease_id, self.lease.control_token
        call = self.access.Exec()
        await call.write(pb2.ExecRequest(open=opened))
        first = await call.read()
        if not isinstance(first, News):
            raise UnknownIdError("The sandbox was not found")
        is_terminal = opened.HasField("terminal")
        program = SharedProgram(opened, tag, first.started.number, call, is_terminal)
        self._running[program.number] = program
        queue = program.subscribe()  # before anything can be missed
        pump = asyncio.create_task(program.pump(), name=f"program {program.number}")
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)
        pump.add_done_callback(lambda _: self._running.pop(program.number, None))
        return StartedProgram(program, queue)

    def running(self) -> Sequence[SharedProgram]:
        """Programs that have not ended."""
        return list(self._running.values())

    def find(self, number: int | None, tag: str | None) -> SharedProgram:
        """A running program by its number or its tag.

        Raises:
            UnknownIdError: there is none.
        """
        for program in self._running.values():
            if program.number == number or (tag and program.tag == tag):
                return program
        wanted = f"pid {number}" if number is not None else f"tag {str(tag)[:80]!r}"
        raise UnknownIdError(f"process with {wanted} not found")

    async def close(self) -> None:
        """End them all."""
        pumps = list(self._pumps)
        for program in self._running.values():
            program.call.cancel()
        for pump in pumps:
            pump.cancel()
        if pumps:
            await asyncio.wait(pumps)
