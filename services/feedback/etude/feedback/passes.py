"""Loops that repeat a pass of blocking work until the process stops."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from etude.common.errors import EtudeError, FencedError

log = logging.getLogger(__name__)


async def repeat_passes(
    run_pass: Callable[[], None], stop: asyncio.Event, *, wait_s: float, what: str
) -> None:
    """Run passes in a thread until told to stop; one that fails is repeated.

    Args:
        run_pass: blocks, and belongs to one thread at a time.
        stop: ends the loop after the pass that runs.
        wait_s: seconds between two passes.
        what: name of the work, for the log.

    Raises:
        FencedError: another service does the same work.
    """
    while not stop.is_set():
        try:
            await asyncio.to_thread(run_pass)
        except FencedError:
            raise
        except EtudeError as error:
            log.warning("%s wait: %s", what, error)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await stop.wait()
