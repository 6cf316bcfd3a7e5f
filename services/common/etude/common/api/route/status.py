"""Observed state of a route."""

from typing import Annotated

from pydantic import Field

from etude.common.api.status_types import Conditions, Count, Resolved, Short, StatusModel


class ServedChannel(StatusModel):
    """A channel of a route."""

    engines: Short = ""
    """Engines that are ready, of those desired."""


class PolicyRouteStatus(StatusModel):
    """Observed state of a route."""

    observed_generation: Count = 0
    """Generation of the spec that this status is about."""
    phase: Annotated[str, Field(max_length=32)] = ""
    """One word, derived from the conditions; nothing is decided by it."""
    conditions: Conditions = ()
    """Facts, each with a reason."""
    run_uid: Short = ""
    """Run that is served, so that a new one of its name is not mistaken for it."""
    gateways: Short = ""
    """Gateways that are ready, of those desired."""
    stable: ServedChannel | None = None
    """What most users get."""
    canary: ServedChannel | None = None
    """What is tried."""
    resolved: Resolved | None = None
    """Defaults pinned at acceptance."""
