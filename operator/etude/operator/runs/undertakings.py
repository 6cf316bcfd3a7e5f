"""What may be undertaken about a run, as it is written down before anything is done."""

from collections.abc import Mapping
from typing import NamedTuple

from etude.common.api.kinds import RLRun
from etude.common.api.status import Failure, Intent
from etude.operator.actions import Moment
from etude.operator.clock import rfc3339
from etude.operator.reasons import Reason


class Undertaking(NamedTuple):
    """An intent, and the failure that led to it."""

    intent: Intent | None
    failure: Failure | None = None


def attempts_of(run: RLRun) -> Mapping[str, int]:
    """The attempt that each role is at."""
    return {role.name: role.attempt for role in run.status.roles}


def restart(run: RLRun, role: str, reason: str, message: str, now: Moment) -> Intent:
    """Start a role anew, every role if it is empty, unless that was done too often."""
    if run.status.restarts.counted >= run.spec.failure_policy.max_restarts:
        limit = run.spec.failure_policy.max_restarts
        message = f"{message}; {limit} restarts were allowed"
        return intent(run, "Fail", Reason.RESTARTS_EXHAUSTED, message, now)
    again = intent(run, "Restart", reason, message, now)
    return again.model_copy(update={"role": role, "attempt": run.status.attempt + 1})


def intent(run: RLRun, kind: str, reason: str, message: str, now: Moment) -> Intent:
    """A decision about the run as it is now."""
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
