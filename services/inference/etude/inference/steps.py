"""The forward passes around a swap: held up briefly, and never in the middle of one."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Protocol

from etude.common.weights import VersionId

DEADLINE_S = 60.0
"""A swap in place takes milliseconds; one that takes this long will not end."""


class Steps(Protocol):
    """The forward passes around a swap."""

    async def freeze(self) -> None:
        """Return once no forward pass runs, and start none; as the pause mode says."""

    async def relabel(self, version: VersionId, *, drop_cache: bool) -> None:
        """Say which version samples from here on; only while frozen."""

    async def thaw(self) -> None:
        """Go on."""


@asynccontextmanager
async def frozen(steps: Steps, *, may_thaw: Callable[[], bool]) -> AsyncIterator[float]:
    """No forward pass runs inside; yields when that began, by time.perf_counter().

    Args:
        steps: what is held up.
        may_thaw: asked at the end; passes stay frozen for ever after a False.
    """
    began = time.perf_counter()
    await steps.freeze()
    try:
        yield began
    finally:
        if may_thaw():
            await steps.thaw()


async def to_its_end(swap: Coroutine[Any, Any, float]) -> float | None:
    """Run a swap to its end, even if the caller is cancelled.

    Returns:
        What the swap returns; None if it hangs, and was given up.
    """
    task = asyncio.create_task(swap, name="swap-weights")
    _, late = await asyncio.wait({task}, timeout=DEADLINE_S)
    if late:
        task.cancel()
        return None
    return await task
