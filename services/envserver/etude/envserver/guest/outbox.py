"""What a node writes to a guest: what is said in one turn of the loop leaves in one piece.

A guest that waits is interrupted by each piece, and an emulated one pays more for that than for
most of what it is asked.
"""

import asyncio
from dataclasses import dataclass, field

_HELD_BYTES = 16 << 10
"""More than this is written at once, so that whoever drains sees what is on its way."""


@dataclass(slots=True)
class Outbox:
    """Frames for one stream, in order."""

    writer: asyncio.StreamWriter
    _held: bytearray = field(default_factory=bytearray)

    @property
    def num_unsent(self) -> int:
        """Bytes that the stream has not taken yet."""
        return len(self._held) + self.writer.transport.get_write_buffer_size()

    def put(self, data: bytes) -> None:
        """Write it before this turn of the loop ends, behind all that was put before."""
        if not self._held:
            asyncio.get_running_loop().call_soon(self.flush)
        self._held += data
        if len(self._held) > _HELD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is held."""
        if self._held and not self.writer.is_closing():
            self.writer.write(bytes(self._held))
        self._held.clear()

    def close(self) -> None:
        """End the stream behind what was put."""
        self.flush()
        self.writer.close()
