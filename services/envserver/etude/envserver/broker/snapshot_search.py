"""Search for the hosts that hold a snapshot, which their next heartbeats may name."""

import asyncio
import time

from etude.common.errors import InvalidFieldError, UnknownIdError
from etude.common.pinned_images import pool_template
from etude.envserver.broker.hosts import Hosts
from etude.v1 import environments_pb2

SNAPSHOT_S = 2.5
"""A snapshot that a host holds is in a heartbeat after this."""
ASK_EVERY_S = 0.02


async def find_snapshot(
    hosts: Hosts, request: environments_pb2.LaunchBatchRequest, *, until_s: float
) -> None:
    """Wait for the heartbeat that names the snapshot of a launch.

    Raises:
        UnknownIdError: none did. A snapshot of another run is as unknown as one that never was.
        InvalidFieldError: it is one of another template.
    """
    run_id, name = request.run_id, request.snapshot_id
    while (template := hosts.template_of(run_id, name)) is None:
        if time.monotonic() >= until_s:
            raise UnknownIdError(f"no host holds snapshot {name!r} of run {run_id!r}")
        await asyncio.sleep(ASK_EVERY_S)
    if pool_template(template) != request.template:
        raise InvalidFieldError("template", f"snapshot {name!r} was made from {template!r}")
