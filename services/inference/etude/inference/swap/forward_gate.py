"""Forward gate: stops forward passes for a swap, between two of them."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from etude.common.errors import UnavailableError
from etude.common.weights import VersionId
from etude.inference.swap import deadlines


class ForwardGate(Protocol):
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


@asynccontextmanager
async def freeze_passes(
    gate: ForwardGate, *, drain_s: float, may_thaw: Callable[[], bool]
) -> AsyncIterator[float]:
    """Run the block without forward passes; yields the start of the pause, by time.perf_counter().

    Args:
        gate: the engine's forward passes.
        drain_s: longest wait for running requests, in pause mode Drain.
        may_thaw: called at the end; passes stay frozen for ever if it returns False.

    Raises:
        UnavailableError: requests did not end; nothing was frozen.
        HangsError: forward passes do not stop, or do not resume.
    """
    began = time.perf_counter()
    try:
        async with asyncio.timeout(drain_s):
            await gate.drain()
    except TimeoutError:
        raise UnavailableError(
            f"requests did not end within {drain_s:g} s; the live version keeps serving"
        ) from None
    await deadlines.run_within(deadlines.FREEZE_LIMIT_S, gate.freeze(), "stopping forward passes")
    try:
        yield began
    finally:
        if may_thaw():
            await deadlines.run_within(
                deadlines.FREEZE_LIMIT_S, gate.thaw(), "resuming forward passes"
            )
