"""Token slots: completions that a rollout worker may have open at a time.

A rollout holds one while it samples, and none while its tools run; its environment is another
matter.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

NOTE_S = 0.25
"""Longest part of a wait that is noted at a time."""


@dataclass(slots=True)
class TokenSlots:
    """Limit of open completions, first come first served."""

    limit: int = 0
    """0 for none."""
    taken: int = 0
    _waiting: "deque[asyncio.Future[None]]" = field(default_factory=deque)

    def resize(self, limit: int) -> None:
        """Set the limit; slots beyond it drain as completions end."""
        self.limit = limit
        self._grant()

    @contextlib.asynccontextmanager
    async def hold(self, note_wait: Callable[[float], None]) -> AsyncIterator[None]:
        """Hold a slot in the block.

        Args:
            note_wait: called with the seconds of each part of the wait, while it lasts: a time
                limit that is up asks for them.
        """
        await self._acquire(note_wait)
        try:
            yield
        finally:
            self.taken -= 1
            self._grant()

    @property
    def _has_room(self) -> bool:
        return not self.limit or self.taken < self.limit

    async def _acquire(self, note_wait: Callable[[float], None]) -> None:
        """Take a slot.

        Raises:
            CancelledError: the wait was cancelled; no slot is taken.
        """
        if self._has_room and not self._waiting:
            self.taken += 1
            return
        since_s = time.monotonic()
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            while not turn.done():
                await asyncio.wait([turn], timeout=NOTE_S)
                now_s = time.monotonic()
                note_wait(now_s - since_s)
                since_s = now_s
        except asyncio.CancelledError:
            if turn.done():
                self.taken -= 1  # granted at the same moment
                self._grant()
            turn.cancel()
            raise

    def _grant(self) -> None:
        while self._waiting and self._has_room:
            turn = self._waiting.popleft()
            if not turn.done():
                self.taken += 1
                turn.set_result(None)
