"""Trying again while the store is away."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from etude.common.errors import StoreError

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0


@dataclass(slots=True)
class Patience:
    """One user of the store, and what the store last refused it."""

    limit_s: float = math.inf
    """Without one the work waits for as long as it takes: a controller that ended would lose the
    steps that are not durable, and its successor could do no more than wait, too.
    """
    trouble: str = ""
    """Empty while the store works."""

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
                self.trouble = str(error)
                log.warning("%s: trying again: %s", what, error)
                await asyncio.sleep(pause_s)
                waited_s += pause_s
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                self.trouble = ""
                return result
