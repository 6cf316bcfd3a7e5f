"""First description of a host's pool, and hosts that can start no environments."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from typing import NoReturn

import grpc

from etude.common.pools.pool_description import PoolDescription, read_description
from etude.common.process import shutdown_signals
from etude.envserver.host import pool_following
from etude.envserver.host.broker_links import BrokerLinks
from etude.envserver.settings import HostSettings
from etude.v1 import environments_pb2

log = logging.getLogger(__name__)

QUICK_S = 1.0
"""For a broker that may have a newer spec than the file; a host's leases wait for that."""
RETRY_S = 1.0
SAY_S = 10.0
PROBE_AGAIN_S = 60.0


async def first_description(settings: HostSettings, brokers: BrokerLinks) -> PoolDescription:
    """The pool's spec as a broker has it; from the mounted file where there is one and none does.

    Raises:
        UserError: it is no valid pool.
    """
    if settings.pool_file is None:
        return await _wait_for_description(brokers)
    mounted, found = read_description(settings.pool_file), None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(QUICK_S):
            found = await _ask_brokers(brokers)
    return mounted if found is None or found.pool.uid != mounted.pool.uid else found


async def _wait_for_description(brokers: BrokerLinks) -> PoolDescription:
    while True:
        found = await _ask_brokers(brokers)
        if found is not None:
            return found
        await asyncio.sleep(RETRY_S)


async def _ask_brokers(brokers: BrokerLinks) -> PoolDescription | None:
    """The pool's spec from the first broker that answers; None if none does."""
    for target in await brokers.candidates(now_s=time.monotonic()):
        try:
            return await pool_following.ask_broker(brokers.stub(target))
        except grpc.aio.AioRpcError as error:
            log.info("%s does not describe the pool: %s", target, error.details())
    return None


async def report_problem(
    problem: Exception,
    settings: HostSettings,
    revision: str,
    brokers: BrokerLinks,
) -> bool:
    """Tell the brokers why this host can start no environments.

    Returns:
        True when it is time to probe again, or the pool has another spec; False when told to stop.
    """
    log.error("no environments can start here: %s", problem)
    heartbeat = environments_pb2.HeartbeatRequest(
        node_id=settings.server.pod,
        endpoint=settings.advertise or settings.server.host,
        unavailable=str(problem),
        pool_revision=revision,
    )
    stop, until_s = asyncio.Event(), time.monotonic() + PROBE_AGAIN_S
    with shutdown_signals(stop):
        while not stop.is_set() and time.monotonic() < until_s:
            if not await _is_current(heartbeat, brokers):
                return True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SAY_S):
                    await stop.wait()
    return not stop.is_set()


async def _is_current(
    heartbeat: environments_pb2.HeartbeatRequest,
    brokers: BrokerLinks,
) -> bool:
    """Send a heartbeat to all brokers; True unless one has another spec."""
    is_current = True
    for target in await brokers.candidates(now_s=time.monotonic()):
        try:
            stub = brokers.stub(target)
            answer = await stub.Heartbeat(heartbeat, timeout=pool_following.ASK_S)
        except grpc.aio.AioRpcError as error:
            log.warning("a broker does not answer: %s", error.details())
        else:
            is_current &= answer.pool_revision in {"", heartbeat.pool_revision}
    return is_current


def restart_process() -> NoReturn:
    """Start this host again in the same process, which keeps its place below a supervisor."""
    log.info("starting again with the pool's spec")
    # A request for its stacks must not kill it before it has a handler for that signal.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    os.execv(  # noqa: S606 - our own program
        sys.executable, [sys.executable, "-m", "etude.envserver.main", "node"]
    )
