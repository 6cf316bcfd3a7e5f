"""Bounded queue of versions in flight, between the trainer and the publishing task."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, NoReturn, TypeVar

from etude.common.errors import WrongStateError
from etude.trainer import metrics

T = TypeVar("T")


def ignore_change() -> None:
    """Default callback, which does nothing."""


@dataclass(slots=True)
class InFlightQueue(Generic[T]):
    """Queue between one producer and one consumer. Use it from the event loop only.

    | task | calls | waits for |
    |---|---|---|
    | producer | add(), then wait_for_room() | room; a setback is raised there |
    | consumer | run() | an item; after a setback, withdraw() |

    An item stays in flight until its work has succeeded. An error ends run(), unless it is a
    setback: then the consumer pauses, with the failed item still first.
    """

    setbacks: tuple[type[Exception], ...] = ()
    """Errors that the producer can recover from."""
    on_change: Callable[[], None] = ignore_change
    """Called when an item is done or met a setback."""
    _items: deque[T] = field(default_factory=deque)
    _setback: Exception | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at the next change, and then replaced."""

    def __len__(self) -> int:
        return len(self._items)

    @property
    def newest(self) -> T | None:
        """The item that was added last, if it is still in flight."""
        return self._items[-1] if self._items else None

    @property
    def has_setback(self) -> bool:
        """True if a setback waits for recovery."""
        return self._setback is not None

    def add(self, item: T) -> None:
        self._items.append(item)
        self._notify()

    async def run(self, work: Callable[[T], Awaitable[None]]) -> NoReturn:
        """Process items in order until cancelled; raise every error of the work but setbacks."""
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

    async def wait_for_room(self, most: int) -> None:
        """Wait until at most this many items are in flight; raise the setback of an item."""
        while True:
            if self._setback is not None:
                raise self._setback
            if len(self._items) <= most:
                return
            await self._changed.wait()

    def withdraw(self) -> list[T]:
        """Withdraw all items after a setback; the failed one comes first.

        Raises:
            WrongStateError: there was no setback, and the consumer may be busy.
        """
        if self._setback is None:
            raise WrongStateError("there was no setback: the items in flight may be half done")
        taken = [*self._items]
        self._items.clear()
        self._setback = None
        self._notify()
        return taken

    def _notify(self) -> None:
        metrics.IN_FLIGHT.set(len(self._items))
        self._changed.set()
        self._changed = asyncio.Event()
