"""Downloads of the next few legs, while the one before them is prepared and committed."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from etude.common.weights import VersionId
from etude.inference.legs import Leg

AHEAD = 2
"""Legs that are staged before their turn: each takes disk, and one before may turn out bad."""


@dataclass(slots=True)
class Ahead:
    """Stages legs in their order, one at a time; a failure comes out when the leg's turn does."""

    _pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="stage-weights")
    )
    _legs: Sequence[Leg] = ()
    _turn: int = 0
    _staged: "dict[int, Future[Path]]" = field(default_factory=dict)

    @contextmanager
    def along(self, legs: Sequence[Leg]) -> Iterator[None]:
        """Take these legs; what is not begun at the end is given up."""
        self._legs, self._staged = legs, {}
        try:
            yield
        finally:
            for future in self._staged.values():
                future.cancel()
            self._legs, self._staged = (), {}

    async def staged(self, number: int, stage: Callable[[Leg], Path]) -> Path:
        """The staged file of a leg; the next ones are on their way when it returns.

        Raises:
            EtudeError: staging it failed, as the function says.
        """
        self._turn = number
        for each in range(number, min(number + 1 + AHEAD, len(self._legs))):
            if each not in self._staged:
                self._staged[each] = self._pool.submit(stage, self._legs[each])
        return await asyncio.wrap_future(self._staged[number])

    def versions(self) -> list[VersionId]:
        """The targets of what is staged, or being staged, before its turn."""
        return [self._legs[each].edge.target.version for each in self._staged if each > self._turn]
