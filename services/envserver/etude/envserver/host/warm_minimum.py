"""Warm pool of a host: the pool's minimum, the brokers' orders, and the levels in heartbeats."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from etude.common.api.pool.spec import EnvPoolSpec
from etude.common.api.pool.warm_pool import MAX_SHELLS, Warm
from etude.envserver.drivers.base import (
    Driver,
    DriverReadiness,
    DriverUnavailableError,
    TemplateReadiness,
)
from etude.v1 import environments_pb2


class WarmMinimum(NamedTuple):
    """Bounds for what is kept ready."""

    paused: Mapping[str, int]
    """Paused clones at least, by template."""
    shells: int = 0
    """Shells of each template at least."""
    max_shells: int = MAX_SHELLS


NO_MINIMUM = WarmMinimum({})
"""No minimum: brokers alone decide."""


def read_minimum(spec: EnvPoolSpec, driver: Driver) -> WarmMinimum:
    """Read the bounds of a pool, on a host whose driver has started.

    Raises:
        DriverUnavailableError: the driver prepares nothing, and the pool asks for it.
    """
    warm = spec.warm
    paused = {
        template.name: template.warm_per_replica
        for template in spec.templates
        if template.warm_per_replica
    }
    asked = "spec.templates[].warmPerReplica" if paused else "spec.warm"
    if (paused or warm != Warm()) and not driver.readiness().templates:
        raise DriverUnavailableError(
            f"driver {driver.name} keeps no environments warm",
            where=asked,
            fix="remove the field, or set spec.isolation.driver to QemuMicroVM",
        )
    return WarmMinimum(paused, warm.shells_per_replica, warm.max_shells_per_replica)


def template_levels(
    readiness: DriverReadiness, awaited: Mapping[str, int]
) -> list[environments_pb2.TemplateLevel]:
    """Levels of each template for a heartbeat: what is ready for future leases.

    Args:
        readiness: what the driver has ready.
        awaited: by template, environments with a lease that have not started yet.
    """
    return [
        environments_pb2.TemplateLevel(
            template=each.template,
            paused_clones=max(0, each.paused_clones - awaited.get(each.template, 0)),
            shells=each.shells,
            # A template that is not here is booted before the host serves.
            resident=True,
            spawn_cpu_ms=round(each.spawn_cpu_ms),
            start_p50_ms=round(each.start_p50_ms),
            start_p90_ms=round(each.start_p90_ms),
            quarantined=each.quarantined,
        )
        for each in readiness.templates
    ]


def combined_targets(
    orders: Iterable[Sequence[environments_pb2.WarmTarget]],
    readiness: DriverReadiness,
    awaited: Mapping[str, int],
    ahead: WarmMinimum = NO_MINIMUM,
) -> list[TemplateReadiness]:
    """Targets of all brokers together, plus what is kept for leases that they have granted.

    Each broker speaks for the runs of its own shard, and of environments that it has yet to grant:
    those that were granted and have not started find what was made ready for them. The pool's
    minimum counts towards the targets.
    """
    paused, shells = Counter[str](), Counter[str]()
    for targets in orders:
        for target in targets:
            paused[target.template] += target.paused_clones
            shells[target.template] += target.shells
    for template, least in ahead.paused.items():
        paused[template] = max(paused[template], least)
    for each in readiness.templates:
        shells[each.template] = max(shells[each.template], ahead.shells)
        paused[each.template] += min(each.paused_clones, awaited.get(each.template, 0))
    return [
        TemplateReadiness(
            template=template,
            paused_clones=paused[template],
            shells=min(shells[template], ahead.max_shells),
        )
        for template in sorted({*paused, *shells})
        if paused[template] or shells[template]
    ]
