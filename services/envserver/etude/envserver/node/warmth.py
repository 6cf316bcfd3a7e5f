"""What a node tells its brokers of its readiness, and what they tell it to prepare."""

from collections.abc import Iterable, Sequence

from etude.envserver.drivers.base import Readiness, Warmth
from etude.v1 import environments_pb2


def levels(readiness: Readiness) -> list[environments_pb2.TemplateLevel]:
    """Each template as a heartbeat says it."""
    return [
        environments_pb2.TemplateLevel(
            template=each.template,
            paused_clones=each.paused_clones,
            shells=each.shells,
            # A template that is not here is booted before the node serves.
            resident=True,
            spawn_cpu_ms=round(each.spawn_cpu_ms),
            start_p50_ms=round(each.start_p50_ms),
            start_p90_ms=round(each.start_p90_ms),
            quarantined=each.quarantined,
        )
        for each in readiness.templates
    ]


def wanted(orders: Iterable[Sequence[environments_pb2.WarmTarget]]) -> list[Warmth]:
    """What all brokers together want: each speaks for the runs of its own shard."""
    sums: dict[str, tuple[int, int]] = {}
    for targets in orders:
        for target in targets:
            paused, shells = sums.get(target.template, (0, 0))
            sums[target.template] = (paused + target.paused_clones, shells + target.shells)
    return [
        Warmth(template=template, paused_clones=paused, shells=shells)
        for template, (paused, shells) in sums.items()
    ]
