"""Scale-down victims: the idle replicas that a pool gives up."""

from collections.abc import Sequence

from etude.operator.pools.autoscaling.values import IdleReplica


def victims(idle: Sequence[IdleReplica], excess: int) -> tuple[str, ...]:
    """Names of at most `excess` idle replicas, the least useful first.

    The order: on draining nodes, without cached images, idle for longest; the name makes it
    deterministic.
    """
    if excess <= 0:
        return ()
    order = sorted(idle, key=lambda r: (not r.is_draining, r.is_cached, r.since_s, r.name))
    return tuple(replica.name for replica in order[:excess])
