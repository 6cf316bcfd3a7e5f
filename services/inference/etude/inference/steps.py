"""The forward passes around a swap: held up briefly, and never in the middle of one."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from etude.common.errors import UnavailableError
from etude.common.weights import VersionId

FREEZE_S = 60.0
"""Longest wait for the forward pass that runs, and for the engine's answers; a long prompt on few
cores takes seconds."""

LOOKS = 10
"""A limit is counted in so many parts: a process that was stopped meanwhile loses one of them."""

_T = TypeVar("_T")


class HangsError(UnavailableError):
    """What was waited for will not end: nothing can be said of the engine any more."""


class Steps(Protocol):
    """The forward passes around a swap."""

    async def drain(self) -> None:
        """Return once no request runs, if the pause mode says that they end first.

        New ones wait outside until thaw(). One that is given up leaves all as it was. Engines
        that let requests run on have nothing to wait for.
        """
        await asyncio.sleep(0)

    async def freeze(self) -> None:
        """Return once no forward pass runs, and start none; as the pause mode says."""

    async def relabel(self, version: VersionId, *, drop_cache: bool) -> None:
        """Say which version samples from here on; only while frozen."""

    async def thaw(self) -> None:
        """Go on."""


async def within(limit_s: float, work: Coroutine[Any, Any, _T], what: str) -> _T:
    """What some work returns, if it ends in time.

    Args:
        limit_s: for the work, in seconds.
        work: given up when time is up, or with the caller.
        what: the work, for the error's words.

    Raises:
        HangsError: it did not.
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
    """No forward pass runs inside; yields when that began, by time.perf_counter().

    Args:
        steps: what is held up.
        drain_s: longest wait for running requests, where they end first.
        may_thaw: asked at the end; passes stay frozen for ever after a False.

    Raises:
        UnavailableError: requests run on; nothing was held up.
        HangsError: forward passes do not stop, or do not go on.
    """
    began = time.perf_counter()
    try:
        async with asyncio.timeout(drain_s):
            await steps.drain()
    except TimeoutError:
        raise UnavailableError(
            f"the live version serves on: requests did not end within {drain_s:g} s"
        ) from None
    await within(FREEZE_S, steps.freeze(), "holding up forward passes")
    try:
        yield began
    finally:
        if may_thaw():
            await within(FREEZE_S, steps.thaw(), "going on with forward passes")


async def to_its_end(swap: Coroutine[Any, Any, float]) -> float:
    """Run a swap to its end, even if the caller is cancelled."""
    task = asyncio.create_task(swap, name="swap-weights")
    await asyncio.wait({task})
    return await task
