"""Forward gate: stops forward passes for a swap, between two of them."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from etude.common.errors import UnavailableError
from etude.common.weights import VersionId

FREEZE_S = 60.0
"""Longest wait for the running forward pass, and for the engine's answers; a long prompt on few
cores takes seconds."""

LOOKS = 10
"""Parts that a limit is counted in: a process that was stopped meanwhile loses only one."""

_T = TypeVar("_T")


class HangsError(UnavailableError):
    """A call exceeded its time limit: the engine's state is unknown."""


class Steps(Protocol):
    """Stops and restarts the forward passes of an engine."""

    async def drain(self) -> None:
        """Return once no request runs, in pause mode Drain; return directly in other modes.

        New requests wait until thaw(). A cancelled drain() admits them again.
        """
        await asyncio.sleep(0)

    async def freeze(self) -> None:
        """Return once no forward pass runs, and start none."""

    async def relabel(self, version: VersionId, *, drop_cache: bool) -> None:
        """Set the version that samples from here on; only while frozen."""

    async def thaw(self) -> None:
        """Resume forward passes."""


async def within(limit_s: float, work: Coroutine[Any, Any, _T], what: str) -> _T:
    """Result of a coroutine that ends within a time limit.

    Args:
        limit_s: for the work, in seconds.
        work: cancelled when the time is over, or with the caller.
        what: name of the work in the error text.

    Raises:
        HangsError: it did not end.
    """
    task = asyncio.create_task(work, name="swap-phase")
    try:
        for _ in range(LOOKS):
            done, _ = await asyncio.wait({task}, timeout=limit_s / LOOKS)
            if done:
                return await task
    finally:
        task.cancel()
    raise HangsError(f"{what} took over {limit_s:g} s")


@asynccontextmanager
async def frozen(
    steps: Steps, *, drain_s: float, may_thaw: Callable[[], bool]
) -> AsyncIterator[float]:
    """Run the block without forward passes; yields the start of the pause, by time.perf_counter().

    Args:
        steps: the engine's forward passes.
        drain_s: longest wait for running requests, in pause mode Drain.
        may_thaw: called at the end; passes stay frozen for ever if it returns False.

    Raises:
        UnavailableError: requests did not end; nothing was frozen.
        HangsError: forward passes do not stop, or do not resume.
    """
    began = time.perf_counter()
    try:
        async with asyncio.timeout(drain_s):
            await steps.drain()
    except TimeoutError:
        raise UnavailableError(
            f"requests did not end within {drain_s:g} s; the live version keeps serving"
        ) from None
    await within(FREEZE_S, steps.freeze(), "stopping forward passes")
    try:
        yield began
    finally:
        if may_thaw():
            await within(FREEZE_S, steps.thaw(), "resuming forward passes")


async def to_its_end(swap: Coroutine[Any, Any, float]) -> float:
    """Run a swap to its end, even if the caller is cancelled."""
    task = asyncio.create_task(swap, name="swap-weights")
    await asyncio.wait({task})
    return await task
