"""Outcome of one served rollout: the value of each signal, as far as it is known."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from etude.common.weights import VersionId


class SignalState(StrEnum):
    """Knowledge of a signal's value."""

    FINAL = "Final"
    """No later event changes it."""
    WAITING = "Waiting"
    """Its delay is not over."""
    CENSORED = "Censored"
    """It will never be known; an estimate stands for it."""


class SignalValue(NamedTuple):
    """One signal of one rollout: a ratio, so that a user's rollouts can be summed."""

    numerator: float
    denominator: float
    """0: the signal does not concern the rollout."""
    state: SignalState = SignalState.FINAL


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOutcome:
    """One served rollout with its signals."""

    rollout: str
    """As `turn_log.identify_rollout` names it."""
    tenant: str
    user: str
    """Pseudonym under the ledger's secret."""
    policy: VersionId | None
    """Version that sampled all of its tokens; None if there were several."""
    arm: str
    experiment: str
    """Empty outside of one."""
    started_ms: int
    values: Mapping[str, SignalValue]
    """By name of the signal."""
