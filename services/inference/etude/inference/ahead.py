"""Downloads of the next few steps, while the one before them is prepared and committed."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from etude.common.weights import Edge, VersionId

AHEAD = 2
"""Steps that are staged before their turn: each takes disk, and a step before may turn out bad."""


@dataclass(slots=True)
class Ahead:
    """Stages steps in their order, one at a time; a failure comes out when the step's turn does."""

    _pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="stage-weights")
    )
    _edges: Sequence[Edge] = ()
    _turn: int = 0
    _staged: "dict[int, Future[Path]]" = field(default_factory=dict)

    @contextmanager
    def along(self, edges: Sequence[Edge]) -> Iterator[None]:
        """Take these steps; what is not begun at the end is given up."""
        self._edges, self._staged = edges, {}
        try:
            yield
        finally:
            for future in self._staged.values():
                future.cancel()
            self._edges, self._staged = (), {}

    async def staged(self, number: int, stage: Callable[[Edge], Path]) -> Path:
        """The staged file of a step; the next ones are on their way when it returns.

        Raises:
            EtudeError: staging it failed, as the function says.
        """
        self._turn = number
        for each in range(number, min(number + 1 + AHEAD, len(self._edges))):
            if each not in self._staged:
                self._staged[each] = self._pool.submit(stage, self._edges[each])
        return await asyncio.wrap_future(self._staged[number])

    def versions(self) -> list[VersionId]:
        """The targets of what is staged, or being staged, before its turn."""
        return [self._edges[each].target.version for each in self._staged if each > self._turn]
