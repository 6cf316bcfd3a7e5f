"""Limits of asynchronous training: how far sampling runs ahead, and how much of it at a time."""

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from etude.common.api.meta import Model, Rule


class AsyncMode(StrEnum):
    """Limit on how far sampling runs ahead of training."""

    SYNC = "Sync"
    ONE_STEP_OFF = "OneStepOff"
    FULLY_ASYNC = "FullyAsync"


class OnStale(StrEnum):
    """Fate of a group that a full batch waits for."""

    WAIT = "Wait"
    REDRAW = "Redraw"
    DROP = "Drop"


class AsyncLimits(Model):
    """Limit on how far sampling runs ahead of training."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="(self.mode == 'Sync') == (self.maxStalenessVersions == 0)",
            holds=lambda s: (s.max_staleness_versions == 0) == (s.mode == AsyncMode.SYNC),
            message="mode Sync needs maxStalenessVersions 0, every other mode at least 1",
            fix="set mode: FullyAsync, or maxStalenessVersions: 0",
            field_path=".maxStalenessVersions",
        ),
        Rule(
            cel="self.mode != 'OneStepOff' || self.maxStalenessVersions == 1",
            holds=lambda s: s.mode != AsyncMode.ONE_STEP_OFF or s.max_staleness_versions == 1,
            message="mode OneStepOff needs maxStalenessVersions 1; use FullyAsync for more",
            fix="set maxStalenessVersions: 1, or mode: FullyAsync",
            field_path=".maxStalenessVersions",
        ),
        Rule(
            cel="self.mode != 'Sync' || self.onStale == 'Wait'",
            holds=lambda s: s.mode != AsyncMode.SYNC or s.on_stale == OnStale.WAIT,
            message="onStale has no effect in mode Sync, in which all groups of a batch start"
            " together",
            fix="remove it, or set mode: FullyAsync",
            field_path=".onStale",
        ),
    )

    mode: AsyncMode = AsyncMode.SYNC
    """Sync trains only on the newest version."""
    max_staleness_versions: Annotated[int, Field(ge=0, le=64)] = 0
    """No trained token is older than this many versions."""
    on_stale: OnStale = OnStale.WAIT
    """A group that would become too old while a full batch is ready: Wait has the batch wait for
    it; Redraw draws it again from the newest version, Drop drops it. Both are counted, and train
    fewer long rollouts than the policy samples."""


class Concurrency(Model):
    """Bounds of the completions that rollouts have open at the same time."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.min <= self.max",
            holds=lambda s: s.min <= s.max,
            message="min must not be above max",
            fix="lower min, or raise max",
            field_path=".min",
        ),
    )

    min: Annotated[int, Field(ge=1, le=65_536)] = 1
    """Fewest, however busy the engines are."""
    max: Annotated[int, Field(ge=1, le=65_536)]
    """Most, with which the phase starts."""
