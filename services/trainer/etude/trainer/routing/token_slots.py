"""Token slots: completions that a rollout worker may have open at a time.

A rollout holds one while it samples, and none while its tools run; its environment is another
matter.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field


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
    async def hold(self) -> AsyncIterator[float]:
        """Hold a slot in the block; gives the seconds that it was waited for."""
        waited_s = await self._acquire()
        try:
            yield waited_s
        finally:
            self.taken -= 1
            self._grant()

    @property
    def _has_room(self) -> bool:
        return not self.limit or self.taken < self.limit

    async def _acquire(self) -> float:
        """Take a slot; returns the seconds that it was waited for.

        Raises:
            CancelledError: the wait was cancelled; no slot is taken.
        """
        if self._has_room and not self._waiting:
            self.taken += 1
            return 0.0
        began_s = time.monotonic()
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.taken -= 1  # granted at the same moment
                self._grant()
            raise
        return time.monotonic() - began_s

    def _grant(self) -> None:
        while self._waiting and self._has_room:
            turn = self._waiting.popleft()
            if not turn.done():
                self.taken += 1
                turn.set_result(None)
