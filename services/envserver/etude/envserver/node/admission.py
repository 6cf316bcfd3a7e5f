"""Which pools and templates a driver's wall is strong enough for."""

from collections.abc import Mapping
from typing import NamedTuple

from etude.common.api.pool import EnvPoolSpec, IsolationLevel, Trust
from etude.envserver.drivers.base import DriverUnavailableError, Strength

_MEETS = {
    IsolationLevel.PROCESS: frozenset(Strength),
    IsolationLevel.SANDBOX: frozenset({Strength.MODERATE, Strength.STRONG}),
    IsolationLevel.MICRO_VM: frozenset({Strength.STRONG}),
}


class Admission(NamedTuple):
    """The templates of a pool, by what the driver may do with them."""

    served: frozenset[str]
    refused: Mapping[str, str]
    """Why, by template."""


def admission(spec: EnvPoolSpec, driver: str, strength: Strength, *, allow_weak: bool) -> Admission:
    """What of a pool may run behind this driver.

    Raises:
        DriverUnavailableError: the pool wants a stronger wall.
    """
    minimum = spec.isolation.minimum
    if strength not in _MEETS[minimum]:
        raise DriverUnavailableError(
            f"the pool wants isolation {minimum} or stronger; driver {driver} is {strength}",
            where="spec.isolation.minimum",
            fix=f"set it to {IsolationLevel.PROCESS} for templates that you trust as your own code",
        )
    refused = {
        template.name: (
            f"template {template.name!r} is {template.trust} and driver {driver} is {strength}:"
            " declare it Trusted, or allow weak isolation on this node"
        )
        for template in spec.templates
        if template.trust is Trust.UNTRUSTED and strength is Strength.WEAK and not allow_weak
    }
    names = {template.name for template in spec.templates}
    return Admission(frozenset(names - refused.keys()), refused)
