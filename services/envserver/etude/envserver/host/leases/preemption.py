"""Preempted leases: their environments are paused so that leases of another class get the slots."""

import asyncio

from etude.common.errors import UnavailableError
from etude.v1 import environments_pb2

HOLD_S = 1.5
"""Time for which a call of a preempted lease is held before it is refused: callers call again."""


class PreemptedError(UnavailableError):
    """The lease goes on as soon as it has a slot again: call again."""

    reason = "Preempted"

    def __init__(self, lease_id: str) -> None:
        super().__init__(f"lease {lease_id} is paused for leases of another class: call again")


def refuse_preempted(held: environments_pb2.HeldLease) -> None:
    """Refuse a call of a preempted lease.

    Raises:
        PreemptedError: it is preempted.
    """
    if held.preempted:
        raise PreemptedError(held.lease.lease_id)


async def hold_preempted(held: environments_pb2.HeldLease) -> None:
    """Hold a call of a preempted lease for a moment, then refuse it.

    It is refused even if the lease goes on meanwhile: a refused call is time that the platform
    took, which counts against no limit of a rollout.

    Raises:
        PreemptedError: it was preempted.
    """
    if held.preempted:
        await asyncio.sleep(HOLD_S)
        raise PreemptedError(held.lease.lease_id)
