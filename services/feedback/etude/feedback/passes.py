"""Loops that repeat a pass of blocking work until the process stops."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from etude.common.errors import EtudeError, FencedError

log = logging.getLogger(__name__)

LARGEST_SHARE = 0.1
"""Of a core, for passes that take longer the more they read."""


async def repeat_passes(
    run_pass: Callable[[], None],
    stop: asyncio.Event,
    *,
    wait_s: float,
    what: str,
    share: float = 1.0,
) -> None:
    """Run passes in a thread until told to stop; one that fails is repeated.

    Args:
        run_pass: blocks, and belongs to one thread at a time.
        stop: ends the loop after the pass that runs.
        wait_s: seconds between two passes.
        what: name of the work, for the log.
        share: largest part of a core that passes may take; after long ones the wait is longer.

    Raises:
        FencedError: another service does the same work.
    """
    while not stop.is_set():
        used_s = 0.0
        try:
            used_s = await asyncio.to_thread(_measure, run_pass)
        except FencedError:
            raise
        except EtudeError as error:
            log.warning("%s wait: %s", what, error)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(wait_s, find_pause_s(used_s, share))):
                await stop.wait()


def find_pause_s(used_s: float, share: float) -> float:
    """Find the pause that keeps passes within a share of a core, from seconds of a core used."""
    return used_s * (1 / share - 1)


def _measure(run_pass: Callable[[], None]) -> float:
    """Run a pass; return the seconds of a core that this thread used."""
    began_s = time.thread_time()
    run_pass()
    return time.thread_time() - began_s
