"""The fake firecracker: `--id ID --api-sock PATH` and the times that the jailer gives it."""

import argparse
import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path

from tests.support.vm.firecracker.engine import Engine
from tests.support.vm.firecracker.rules import Order, Phase, RefusedError, Rules
from tests.support.vm.firecracker.vsock import Vsock

from etude.envserver.drivers.vm.errors import VmmError

VERSION = "1.13.1"
_ROOT = Path()
"""The jailer leaves the process in its chroot, which this one is not held to."""


class Monitor:
    """One process, one machine."""

    def __init__(self, vm_id: str) -> None:
        self._id = vm_id
        self._rules = Rules()
        self._engine = Engine(_ROOT)
        self._vsock: Vsock | None = None
        self._busy = asyncio.Lock()

    async def serve(self, api: str) -> None:
        """Answer requests for ever."""
        server = await asyncio.start_unix_server(self._connected, path=self._engine.path(api))
        await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("ascii")
                request, *lines = head.split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in lines if line)
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                method, path, version = request.split(" ")
                assert version == "HTTP/1.1"
                async with self._busy:
                    writer.write(await self._answer(method, path, body))
                await writer.drain()
        writer.close()

    async def _answer(self, method: str, path: str, body: bytes) -> bytes:
        if (method, path) == ("GET", "/"):
            return _response(200, self._description())
        was, order = self._rules.phase, None
        try:
            order = self._rules.taken(method, path, json.loads(body or b"null"))
            if order is not None:
                await self._perform(order)
        except (RefusedError, VmmError, ValueError) as error:
            self._rules.phase = was
            if order is not None and order.name in {"load", "start"}:
                # As the original: what has failed half is not to be used.
                asyncio.get_running_loop().call_later(0.1, os._exit, 1)
            return _response(400, {"fault_message": str(error)})
        return _response(204, None)

    async def _perform(self, order: Order) -> None:
        match order.name:
            case "start":
                await self._engine.boot(self._rules)
                await self._begun(is_booting=True)
            case "load":
                await self._engine.load(dict(order.body), self._rules)
                await self._begun(is_booting=False)
            case "create":
                if self._vsock is not None:
                    self._vsock.reset()
                await self._engine.create(dict(order.body))
            case "pause":
                await self._engine.vm.freeze()
            case _:
                await self._engine.vm.thaw()
        if self._vsock is not None:
            runs = self._rules.phase is Phase.RUNNING
            self._vsock.runs.set() if runs else self._vsock.runs.clear()

    async def _begun(self, *, is_booting: bool) -> None:
        assert self._rules.vsock is not None
        self._vsock = Vsock(self._engine.vm, is_booting=is_booting)
        await self._vsock.serve(self._engine.path(self._rules.vsock["uds_path"]))
        self._engine.vm.exited.add_done_callback(lambda _: os._exit(0))

    def _description(self) -> dict[str, str]:
        return {
            "id": self._id,
            "state": self._rules.phase.value,
            "vmm_version": VERSION,
            "app_name": "Firecracker",
        }


def _response(status: int, body: object) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n"
    if data:
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    return f"{head}\r\n".encode() + data


def main() -> None:
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"Firecracker v{VERSION}\n")
        return
    run(sys.argv[1:])


def run(words: list[str]) -> None:
    """Be the monitor, in the folder that is its root."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--id", required=True)
    for name in ("--start-time-us", "--start-time-cpu-us", "--parent-cpu-time-us"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--api-sock", default="/run/firecracker.socket")
    parser.add_argument("--level", choices=("Error", "Warning", "Info", "Debug", "Off"))
    options = parser.parse_args(words)
    asyncio.run(Monitor(options.id).serve(options.api_sock))


if __name__ == "__main__":
    main()
