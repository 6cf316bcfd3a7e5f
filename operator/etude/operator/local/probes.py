"""HTTP probes of a process: startup, liveness, readiness."""

import asyncio
from collections.abc import Callable

from etude.operator.local.ports import LOOPBACK
from etude.operator.local.process_spec import HttpProbe, ProcessSpec

EAGER_PERIOD_S = 0.25
"""Probe interval while a role starts, shorter than a kubelet's: a user waits."""


class UnresponsiveError(Exception):
    """A process failed its startup or liveness probe too often."""


async def probe_once(probe: HttpProbe) -> bool:
    """Send one probe; returns true if it succeeds in time."""
    try:
        async with asyncio.timeout(probe.timeout_s):
            reader, writer = await asyncio.open_connection(LOOPBACK, probe.port)
            try:
                writer.write(f"GET {probe.path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                status = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
    return status.split(b" ")[1:2] in ([b"200"], [b"204"])


async def run_probes(process: ProcessSpec, tell_ready: Callable[[bool], None]) -> None:
    """Probe a process until cancelled.

    Raises:
        UnresponsiveError: the process does not answer and should be restarted.
    """
    await _until_started(process.startup)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_watch_liveness(process.liveness), name="liveness")
            group.create_task(_watch_readiness(process.readiness, tell_ready), name="readiness")
    except* UnresponsiveError as failures:
        raise failures.exceptions[0] from None
    await asyncio.Event().wait()  # a container without probes is never unresponsive


async def _until_started(probe: HttpProbe | None) -> None:
    if probe is None:
        return
    loop = asyncio.get_running_loop()
    limit_s = probe.failures * probe.period_s
    began = loop.time()
    while not await probe_once(probe):
        if loop.time() - began > limit_s:
            raise UnresponsiveError(f"no answer on {probe.path} within {limit_s:.0f} s")
        await asyncio.sleep(EAGER_PERIOD_S)


async def _watch_liveness(probe: HttpProbe | None) -> None:
    failures = 0
    while probe is not None and failures < probe.failures:
        await asyncio.sleep(probe.period_s)
        failures = 0 if await probe_once(probe) else failures + 1
    if probe is not None:
        raise UnresponsiveError(f"{failures} probes of {probe.path} in a row went unanswered")


async def _watch_readiness(probe: HttpProbe | None, tell_ready: Callable[[bool], None]) -> None:
    if probe is None:
        tell_ready(True)  # noqa: FBT003 - what is told is the flag itself
        return
    is_ready, failures = False, 0
    while True:
        if await probe_once(probe):
            is_ready, failures = True, 0
        else:
            failures += 1
            is_ready = is_ready and failures < probe.failures
        tell_ready(is_ready)
        await asyncio.sleep(probe.period_s if is_ready else EAGER_PERIOD_S)
