"""Task that builds windows until the process stops."""

import asyncio
import contextlib
import logging

from etude.common.errors import EtudeError, FencedError
from etude.feedback.windows.builder import WindowBuilder

log = logging.getLogger(__name__)

_LONGEST_WAIT_S = 10.0
_SHORTEST_WAIT_S = 0.25


async def build_windows(builder: WindowBuilder, stop: asyncio.Event) -> None:
    """Build windows until told to stop; a pass that fails is repeated.

    Raises:
        FencedError: another service writes the ledger.
    """
    wait_s = min(_LONGEST_WAIT_S, max(_SHORTEST_WAIT_S, builder.rules.horizon_s / 20))
    while not stop.is_set():
        try:
            await asyncio.to_thread(builder.run_pass)
        except FencedError:
            raise
        except EtudeError as error:
            log.warning("windows wait: %s", error)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await stop.wait()
