"""Trying again while the store is away."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from etude.common.errors import StoreError

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
BELIEVED_S = 600.0
"""For how long a refusal tells of the store: three times the longest call with its pause."""


@dataclass(slots=True)
class Refusal:
    """What the store last said no with, while that tells of the store.

    A run that waits for its store is never stalled. So a try that neither succeeds nor fails must
    not pass for such a wait: nobody would start the run anew.
    """

    clock: Callable[[], float] = time.monotonic
    _words: str = ""
    _since_s: float = -math.inf

    def say(self, words: str) -> None:
        """The store refused something just now."""
        self._words, self._since_s = words, self.clock()

    def clear(self) -> None:
        """It works."""
        self._words = ""

    @property
    def words(self) -> str:
        """Empty while the store works, or once nothing was heard of it for long."""
        return self._words if self.clock() - self._since_s < BELIEVED_S else ""


@dataclass(slots=True)
class Patience:
    """One user of the store, and what the store last refused it."""

    limit_s: float = math.inf
    """Without one the work waits for as long as it takes: a controller that ended would lose the
    steps that are not durable, and its successor could do no more than wait, too.
    """
    refusal: Refusal = field(default_factory=Refusal)

    @property
    def trouble(self) -> str:
        """Empty while the store works."""
        return self.refusal.words

    async def keep_trying(self, what: str, work: Callable[[], Awaitable[T]]) -> T:
        """The result of work that may be repeated.

        Raises:
            StoreError: the store stayed away longer than the limit.
        """
        pause_s, waited_s = FIRST_PAUSE_S, 0.0
        while True:
            try:
                result = await work()
            except StoreError as error:
                if waited_s >= self.limit_s:
                    raise
                self.refusal.say(str(error))
                log.warning("%s: trying again: %s", what, error)
                await asyncio.sleep(pause_s)
                waited_s += pause_s
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                self.refusal.clear()
                return result
