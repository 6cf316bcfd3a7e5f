"""Console of a booting guest."""

import asyncio
import socket

KEPT_BYTES = 1 << 16
_READ_BYTES = 1 << 14


class Console:
    """Reads a serial console and keeps its end, however much the guest writes."""

    def __init__(self) -> None:
        self._ours, self.theirs = socket.socketpair()
        """The VMM inherits `theirs`."""
        self._ours.settimeout(0)
        self._kept = bytearray()
        asyncio.get_running_loop().add_reader(self._ours, self._read)

    def tail(self) -> str:
        """End of the output."""
        return self._kept.decode(errors="replace")

    def close(self) -> None:
        """Stop reading; safe to repeat."""
        if self._ours.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._ours)
        self._ours.close()
        self.theirs.close()

    def _read(self) -> None:
        try:
            data = self._ours.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._ours)
        self._kept += data
        del self._kept[:-KEPT_BYTES]
