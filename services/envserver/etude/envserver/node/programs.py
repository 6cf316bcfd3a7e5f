"""What a controller runs in an environment beside its turns."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from etude.common.errors import FullError
from etude.envserver.drivers.programs import RunningProgram

MAX_PROGRAMS = 16
"""At a time, in one lease."""
END_S = 5.0
"""For programs that are killed; they take milliseconds."""


@dataclass(slots=True)
class Programs:
    """Those of one lease that run."""

    _running: set[RunningProgram] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self._running)

    async def start(self, begin: Callable[[], Awaitable[RunningProgram]]) -> RunningProgram:
        """One more.

        Raises:
            FullError: there are too many.
        """
        if len(self._running) >= MAX_PROGRAMS:
            raise FullError(f"{MAX_PROGRAMS} programs run in this lease", retry_after_s=5)
        running = await begin()
        self._running.add(running)
        return running

    async def close(self, running: RunningProgram) -> None:
        """Nobody listens to it any more."""
        await running.close()
        self._running.discard(running)

    async def end(self) -> None:
        """Kill all of them, and wait a little."""
        programs = set(self._running)
        for program in programs:
            program.kill()
        if programs:
            endings = [asyncio.ensure_future(program.ending()) for program in programs]
            await asyncio.wait(endings, timeout=END_S)
            for ending in endings:
                ending.cancel()
