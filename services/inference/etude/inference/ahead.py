"""Prefetch: downloads of the next update steps while the one before them is activated."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from etude.common.weights import VersionId
from etude.inference.legs import Leg

AHEAD = 2
"""Steps staged before their turn: each takes disk, and an earlier one may be damaged."""


@dataclass(slots=True)
class Ahead:
    """Stages update steps in order, one at a time; a failure is raised at the step's turn."""

    _pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="stage-weights")
    )
    _legs: Sequence[Leg] = ()
    _turn: int = 0
    _staged: "dict[int, Future[Path]]" = field(default_factory=dict)

    @contextmanager
    def along(self, legs: Sequence[Leg]) -> Iterator[None]:
        """Prefetch these steps; downloads that have not started at the end are cancelled."""
        self._legs, self._staged = legs, {}
        try:
            yield
        finally:
            for future in self._staged.values():
                future.cancel()
            self._legs, self._staged = (), {}

    async def staged(self, number: int, stage: Callable[[Leg], Path]) -> Path:
        """The staged file of a step; downloads of the next ones are queued first.

        Raises:
            EtudeError: staging the step failed; see the function.
        """
        self._turn = number
        for each in range(number, min(number + 1 + AHEAD, len(self._legs))):
            if each not in self._staged:
                self._staged[each] = self._pool.submit(stage, self._legs[each])
        return await asyncio.wrap_future(self._staged[number])

    def versions(self) -> list[VersionId]:
        """Targets of the steps that are staged, or being staged, before their turn."""
        return [self._legs[each].edge.target.version for each in self._staged if each > self._turn]
