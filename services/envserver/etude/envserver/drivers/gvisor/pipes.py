"""Connection to an agent: two named pipes, which a later process of the host finds again.

The container holds both ends of both, so none is closed while no host process runs; ours are opened
for one direction, so they close with the container.
"""

import asyncio
import os
from pathlib import Path

from etude.envserver.guest.channel import GuestChannel

_TO, _FROM = "to-agent", "from-agent"


def make(folder: Path) -> tuple[int, int]:
    """Create pipes in a folder, opened as a container's standard input and output."""
    for name in (_TO, _FROM):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name, 0o600)
    to_agent = os.open(folder / _TO, os.O_RDWR | os.O_CLOEXEC)
    return to_agent, os.open(folder / _FROM, os.O_RDWR | os.O_CLOEXEC)


async def dial(folder: Path) -> GuestChannel:
    """Open a channel over the pipes of a running container.

    Raises:
        OSError: the other ends are closed.
    """
    loop = asyncio.get_running_loop()
    flags = os.O_NONBLOCK | os.O_CLOEXEC
    incoming = os.fdopen(os.open(folder / _FROM, os.O_RDONLY | flags), "rb", 0)
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), incoming)
    outgoing = os.fdopen(os.open(folder / _TO, os.O_WRONLY | flags), "wb", 0)
    # A protocol of its own, for the pipe's end only.
    transport, protocol = await loop.connect_write_pipe(
        lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), outgoing
    )
    return GuestChannel(reader, asyncio.StreamWriter(transport, protocol, None, loop))
