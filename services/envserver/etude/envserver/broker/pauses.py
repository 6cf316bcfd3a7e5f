"""Keeps the garbage collector from stopping a broker that holds many leases."""

import asyncio
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field

EVERY_S = 0.25
"""What a quarter of a second leaves behind is looked through in a few milliseconds."""
QUIET_S, LATEST_S = 600.0, 3_600.0
"""Everything is looked through so often while nobody waits, and so often at the latest."""


@dataclass(slots=True)
class Pauses:
    """Looks through what is new, and leaves what is old alone until it is quiet.

    A full collection takes 200 ms with 30,000 leases, which hold no reference cycles: all of it
    is waited for by whoever asks for an environment then.
    """

    is_quiet: Callable[[], bool]
    _full_s: float = field(default_factory=time.monotonic)

    async def run(self, stop: asyncio.Event) -> None:
        """Collect until told to stop."""
        while not stop.is_set():
            self.collect(now_s=time.monotonic())
            try:
                async with asyncio.timeout(EVERY_S):
                    await stop.wait()
            except TimeoutError:
                continue
        gc.unfreeze()

    def collect(self, *, now_s: float) -> bool:
        """Collect what is new, or everything if it is time; True in the latter case."""
        silence_s = now_s - self._full_s
        is_full = silence_s >= LATEST_S or (silence_s >= QUIET_S and self.is_quiet())
        if is_full:
            self._full_s = now_s
            gc.unfreeze()
        gc.collect()
        gc.freeze()
        return is_full
