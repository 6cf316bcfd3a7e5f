"""What a pool has each of its nodes keep ready, whatever its brokers want."""

from collections.abc import Mapping
from typing import NamedTuple

from etude.common.api.pool import EnvPoolSpec
from etude.common.api.warm import MAX_SHELLS, Warm
from etude.envserver.drivers.base import Driver, DriverUnavailableError


class Ahead(NamedTuple):
    """Bounds for what is kept ready."""

    paused: Mapping[str, int]
    """Paused clones at least, by template."""
    shells: int = 0
    """Of each template, at least."""
    max_shells: int = MAX_SHELLS


NOTHING = Ahead({})
"""Brokers alone decide."""


def ahead(spec: EnvPoolSpec, driver: Driver) -> Ahead:
    """The bounds of a pool, on a node whose driver has started.

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
            f"driver {driver.name} starts every environment anew and prepares none",
            where=asked,
            fix="remove the field, or set spec.isolation.driver to QemuMicroVM",
        )
    return Ahead(paused, warm.shells_per_replica, warm.max_shells_per_replica)
