"""What one task works off in order while its maker goes on, so far ahead and no farther."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, NoReturn, TypeVar

from etude.common.errors import WrongStateError
from etude.trainer import metrics

T = TypeVar("T")


def nobody() -> None:
    """Hears of no change."""


@dataclass(slots=True)
class InFlight(Generic[T]):
    """A queue between one maker and one worker. Use it from the event loop only.

    | who | calls | waits for |
    |---|---|---|
    | maker | add(), and room() before it goes on | room, or a setback, which it is told there |
    | worker | run() | an item; after a setback, for withdraw() |

    An item stays in flight until the work on it ended well. What goes wrong ends run(), unless it
    is a setback: then the work rests, with the item that met it still first.
    """

    setbacks: tuple[type[Exception], ...] = ()
    """What the maker can overcome."""
    on_change: Callable[[], None] = nobody
    """Called when an item is done or met a setback."""
    _items: deque[T] = field(default_factory=deque)
    _setback: Exception | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at the next change, and then replaced."""

    def __len__(self) -> int:
        return len(self._items)

    @property
    def newest(self) -> T | None:
        """What was added last, if it still is in flight."""
        return self._items[-1] if self._items else None

    @property
    def is_stuck(self) -> bool:
        """Whether a setback waits to be overcome."""
        return self._setback is not None

    def add(self, item: T) -> None:
        """Hand over one more."""
        self._items.append(item)
        self._notify()

    async def run(self, work: Callable[[T], Awaitable[None]]) -> NoReturn:
        """Work off one after the other until cancelled; raises what work raises, but setbacks."""
        while True:
            while self._setback is not None or not self._items:
                await self._changed.wait()
            try:
                await work(self._items[0])
            except self.setbacks as error:
                self._setback = error
            else:
                self._items.popleft()
            self._notify()
            self.on_change()

    async def room(self, most: int) -> None:
        """Wait until at most so many are in flight; raises the setback that an item met."""
        while True:
            if self._setback is not None:
                raise self._setback
            if len(self._items) <= most:
                return
            await self._changed.wait()

    def withdraw(self) -> list[T]:
        """Take back all that is in flight after a setback, the item that met it first.

        Raises:
            WrongStateError: there was none, and the worker may be at work.
        """
        if self._setback is None:
            raise WrongStateError("there was no setback: what is in flight may be half done")
        taken = [*self._items]
        self._items.clear()
        self._setback = None
        self._notify()
        return taken

    def _notify(self) -> None:
        metrics.IN_FLIGHT.set(len(self._items))
        self._changed.set()
        self._changed = asyncio.Event()
