"""QMP client of a VMM, which its guest may have taken over.

Covered: long lines, deep or wrong JSON, unexpected answers, floods of events, timeouts. Each ends
the connection with a VmmError, and memory stays bounded. Not covered: a well-formed answer that is
false.
"""

import asyncio
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from etude.envserver.drivers.vm.errors import VmmError

LINE_BYTES = 1 << 20
"""The longest true answer, a list of all QAPI types, has 200 KiB."""
_READ_BYTES = 1 << 16
COMMAND_LIMIT_S = 30.0
"""An idle machine answers in a millisecond; a busy one may have no core free."""

Event = Mapping[str, Any]


class QmpClient:
    """One connection; commands may overlap, and are executed in order."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self._socket = connection
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._expected: list[tuple[Callable[[Event], bool], asyncio.Future[Event]]] = []
        self._next_id = 0
        self._buffer = bytearray()
        self._greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._error: VmmError | None = None
        self._reader = asyncio.create_task(self._read(), name=f"qmp-{name}")

    async def greet(self) -> None:
        """Wait for the VMM's greeting and accept it.

        Raises:
            VmmError: there is none.
        """
        try:
            async with asyncio.timeout(COMMAND_LIMIT_S):
                await self._greeted
        except TimeoutError as cause:
            raise VmmError("the VMM did not greet") from cause
        await self.execute("qmp_capabilities")

    async def execute(
        self,
        command: str,
        arguments: Mapping[str, object] | None = None,
        *,
        descriptors: Sequence[int] = (),
        limit_s: float = COMMAND_LIMIT_S,
    ) -> Any:  # noqa: ANN401 - each command has another answer
        """Execute one command, with file descriptors passed along, and return its answer.

        Raises:
            VmmError: it was refused, took too long, or the connection ended.
        """
        if self._error is not None:
            raise self._error
        self._next_id += 1
        number = self._next_id
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        message = {"execute": command, "id": number}
        if arguments:
            message["arguments"] = dict(arguments)
        try:
            # Compact: QEMU reads commands byte by byte, each with ten system calls.
            self._send(json.dumps(message, separators=(",", ":")).encode(), descriptors)
            async with asyncio.timeout(limit_s):
                answer = await future
        except TimeoutError as cause:
            raise VmmError(f"{command}: no answer in {limit_s:g} s") from cause
        finally:
            self._waiting.pop(number, None)
        if "error" in answer:
            raise VmmError(f"{command}: {_description(answer['error'])}")
        return answer["return"]

    def expect(self, wanted: Callable[[Event], bool]) -> "asyncio.Future[Event]":
        """Expect the next matching event. Call it before the command that causes it."""
        future: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
        if self._error is not None:
            future.set_exception(self._error)
        else:
            self._expected.append((wanted, future))
            future.add_done_callback(self._forget)
        return future

    async def close(self) -> None:
        """Close the connection; the VMM accepts a new one."""
        self._reader.cancel()
        await asyncio.wait([self._reader])
        self._fail(VmmError("the connection was closed"))
        self._socket.close()

    def _forget(self, future: "asyncio.Future[Event]") -> None:
        self._expected = [each for each in self._expected if each[1] is not future]

    def _send(self, message: bytes, descriptors: Sequence[int]) -> None:
        try:
            sent = socket.send_fds(self._socket, [message], list(descriptors))
        except OSError as cause:
            raise VmmError(f"the VMM accepts no commands: {cause}") from cause
        if sent != len(message):
            # Commands are short: a full buffer means that the VMM has not read for a long time.
            self._fail(VmmError("the VMM does not read its commands"))

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while data := await loop.sock_recv(self._socket, _READ_BYTES):
                self._take(data)
                # The read above does not wait while there is data, and other VMs need the loop.
                await asyncio.sleep(0)
            self._fail(VmmError("the VMM closed the connection"))
        except VmmError as error:
            self._fail(error)
        except OSError as cause:
            self._fail(VmmError(f"the connection to the VMM broke: {cause}"))

    def _take(self, data: bytes) -> None:
        self._buffer += data
        *lines, rest = self._buffer.split(b"\n")
        if max(len(rest), *map(len, lines), 0) > LINE_BYTES:
            raise VmmError(f"the VMM sent a line of more than {LINE_BYTES} bytes")
        self._buffer = rest
        for line in lines:
            self._dispatch(_decode(line))

    def _dispatch(self, message: Mapping[str, Any]) -> None:
        number = message.get("id")
        if "event" in message:
            self._announce(message)
        elif "QMP" in message:
            if not self._greeted.done():
                self._greeted.set_result(None)
        elif ("return" in message or "error" in message) and isinstance(number, int):
            future = self._waiting.get(number)
            if future is not None and not future.done():
                future.set_result(message)
        else:
            raise VmmError("the VMM sent a message that is neither answer nor event")

    def _announce(self, event: Event) -> None:
        for wanted, future in tuple(self._expected):
            if not future.done() and wanted(event):
                future.set_result(event)

    def _fail(self, error: VmmError) -> None:
        self._error = self._error or error
        futures = [future for _, future in self._expected]
        for future in (*self._waiting.values(), *futures, self._greeted):
            if not future.done():
                future.set_exception(self._error)
                future.exception()  # marked as retrieved: there may be no waiter


def _decode(line: bytes | bytearray) -> Mapping[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as cause:
        raise VmmError("the VMM sent a line that is not JSON") from cause
    if not isinstance(message, dict):
        raise VmmError("the VMM sent a line that is not a JSON object")
    return message


def _description(error: object) -> str:
    match error:
        case {"desc": str(text)}:
            return text[:500]
        case _:
            return "refused without a reason"


class PassedFile(NamedTuple):
    """A file as the VMM knows it."""

    fdset: int
    """Opened as /dev/fdset/N; closed with `remove-fd`."""
    descriptor: int
    """Descriptor number in the VMM's process."""


async def pass_file(qmp: QmpClient, descriptor: int) -> PassedFile:
    """Pass a file to the VMM.

    Raises:
        VmmError: the VMM refuses it.
    """
    match await qmp.execute("add-fd", descriptors=(descriptor,)):
        case {"fdset-id": int(fdset), "fd": int(number)} if fdset >= 0 and number >= 0:
            return PassedFile(fdset, number)
        case other:
            raise VmmError(f"add-fd: the answer {str(other)[:100]} has no numbers")
