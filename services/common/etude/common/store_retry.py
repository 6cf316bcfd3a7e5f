"""Retry with backoff while the object store is unreachable."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from etude.common.backoff import Backoff
from etude.common.errors import StoreError

log = logging.getLogger(__name__)

T = TypeVar("T")


def is_any(_error: StoreError) -> bool:
    """Accept every error of the store."""
    return True


FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
BELIEVED_S = 600.0
"""Age at which an error is outdated: three times the longest call with its pause."""


@dataclass(slots=True)
class StoreRefusal:
    """Last error of the store, until it is outdated.

    A run that waits for its store does not count as stalled. An attempt that neither succeeds nor
    fails must not pass for such a wait, or a stalled run would never be restarted.
    """

    clock: Callable[[], float] = time.monotonic
    _words: str = ""
    _since_s: float = -math.inf

    def record(self, words: str) -> None:
        """Record an error of the store."""
        self._words, self._since_s = words, self.clock()

    def clear(self) -> None:
        self._words = ""

    @property
    def message(self) -> str:
        """The error; empty while the store works, or once the error is outdated."""
        return self._words if self.clock() - self._since_s < BELIEVED_S else ""


@dataclass(slots=True)
class StoreRetry:
    """Retries of one user of the store, and its last error."""

    limit_s: float = math.inf
    """Longest total wait. Unlimited by default: a controller that ended would lose the steps that
    are not durable, and its successor could only wait as well.
    """
    refusal: StoreRefusal = field(default_factory=StoreRefusal)
    is_repeated: Callable[[StoreError], bool] = is_any
    """Selects errors after which work is repeated."""
    num_repeats: int = 0
    """Attempts after a failed one."""

    @property
    def problem(self) -> str:
        """The last error; empty while the store works."""
        return self.refusal.message

    async def retry(self, what: str, work: Callable[[], Awaitable[T]]) -> T:
        """Run idempotent work, with retries.

        Raises:
            StoreError: the store stayed away longer than the limit, or work is not repeated after
                this error.
        """
        backoff, waited_s = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S), 0.0
        while True:
            try:
                result = await work()
            except StoreError as error:
                if waited_s >= self.limit_s or not self.is_repeated(error):
                    raise
                self.num_repeats += 1
                self.refusal.record(str(error))
                log.warning("%s failed and is retried: %s", what, error)
                pause_s = backoff.next_s()
                await asyncio.sleep(pause_s)
                waited_s += pause_s
            else:
                self.refusal.clear()
                return result
