"""Time limit of a rollout, which pauses while the services that it needs are away."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


@asynccontextmanager
async def time_limit(limit_s: float, *, paused_s: Callable[[], float]) -> AsyncIterator[None]:
    """Cancel the block after a time that does not count pauses.

    Args:
        limit_s: seconds that the block may take, pauses not counted.
        paused_s: returns the seconds paused so far; read when the time seems to be up.

    Raises:
        TimeoutError: the time is up.
    """
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    timers: list[asyncio.TimerHandle] = []
    async with asyncio.timeout(None) as deadline:

        def check() -> None:
            end_s = started_s + limit_s + paused_s()
            if loop.time() >= end_s:
                deadline.reschedule(loop.time())
            else:
                timers[:] = [loop.call_at(end_s, check)]

        timers.append(loop.call_at(started_s + limit_s, check))
        try:
            yield
        finally:
            timers[0].cancel()
