"""Which replicas a pool gives up."""

from collections.abc import Sequence

from etude.operator.scaling.values import IdleReplica


def victims(idle: Sequence[IdleReplica], excess: int) -> tuple[str, ...]:
    """Names of at most so many idle replicas, those first that are missed least.

    On machines to be vacated, then without images, then idle for longest; the name decides last,
    so that the same question has the same answer.
    """
    if excess <= 0:
        return ()
    order = sorted(idle, key=lambda r: (not r.is_draining, r.is_cached, r.since_s, r.name))
    return tuple(replica.name for replica in order[:excess])
