"""Transitions of a run: intents that are recorded before they are carried out."""

from collections.abc import Mapping
from typing import NamedTuple

from etude.common.api.kinds import RLRun
from etude.common.api.run.status import Failure, Intent
from etude.operator.actions import ClockReading
from etude.operator.clock import rfc3339
from etude.operator.reasons import Reason


class RunTransition(NamedTuple):
    """An intent, and the failure that led to it."""

    intent: Intent | None
    failure: Failure | None = None


def attempts_of(run: RLRun) -> Mapping[str, int]:
    """The present attempt of each role."""
    return {role.name: role.attempt for role in run.status.roles}


def restart_intent(run: RLRun, role: str, reason: str, message: str, now: ClockReading) -> Intent:
    """The intent to restart a role (all if empty), or to fail once maxRestarts is reached."""
    if run.status.restarts.counted >= run.spec.failure_policy.max_restarts:
        limit = run.spec.failure_policy.max_restarts
        message = f"{message}; failurePolicy.maxRestarts is {limit}"
        return new_intent(run, "Fail", Reason.RESTARTS_EXHAUSTED, message, now)
    again = new_intent(run, "Restart", reason, message, now)
    return again.model_copy(update={"role": role, "attempt": run.status.attempt + 1})


def new_intent(run: RLRun, kind: str, reason: str, message: str, now: ClockReading) -> Intent:
    """An intent for the present generation and attempt of the run."""
    return Intent.model_validate(
        {
            "type": kind,
            "reason": str(reason)[:64],
            "message": message[:1024],
            "generation": run.metadata.generation,
            "attempt": run.status.attempt,
            "since": rfc3339(now.wall_s),
        }
    )


def transition(
    run: RLRun, kind: str, reason: str, message: str, now: ClockReading
) -> RunTransition:
    """A transition without a failure."""
    return RunTransition(new_intent(run, kind, reason, message, now))
