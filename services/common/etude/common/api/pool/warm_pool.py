"""Warm pool of a host: VMs of each template that are started ahead of demand."""

from typing import Annotated, ClassVar

from pydantic import Field

from etude.common.api.meta import Model, Rule

MAX_SHELLS = 64


class Warm(Model):
    """Warm pool: VMs without state that wait for an environment, for each template."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.shellsPerReplica <= self.maxShellsPerReplica",
            holds=lambda s: s.shells_per_replica <= s.max_shells_per_replica,
            message="shellsPerReplica must be at most maxShellsPerReplica",
            fix="raise maxShellsPerReplica, or lower shellsPerReplica",
            field_path=".shellsPerReplica",
        ),
    )

    shells_per_replica: Annotated[int, Field(ge=0, le=MAX_SHELLS)] = 0
    """VMs that a host keeps also without demand; each takes about 15 MiB."""
    max_shells_per_replica: Annotated[int, Field(ge=0, le=MAX_SHELLS)] = MAX_SHELLS
    """How far starts and rollbacks that found nothing ready may raise that."""
