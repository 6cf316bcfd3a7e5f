"""A run whose pods cannot be seen, because the API that makes them is not served any more."""

from etude.common.api.kinds import RLRun
from etude.common.api.status import RLRunStatus
from etude.operator import integrations
from etude.operator.actions import Moment
from etude.operator.clock import rfc3339
from etude.operator.conditions import Fact, conditions


def is_blind(run: RLRun, problem: Fact) -> bool:
    """Whether a run that has started hangs on what is not there."""
    return run.status.resolved is not None and integrations.hides_pods(problem)


def status(run: RLRun, problem: Fact, now: Moment) -> RLRunStatus:
    """What is missing; everything else is left as it was said last."""
    others = [c for c in run.status.conditions if c.type != problem.type]
    told = conditions(
        [problem],
        run.status.conditions,
        generation=run.metadata.generation,
        now=rfc3339(now.wall_s),
    )
    return run.status.model_copy(update={"conditions": (*told, *others)})
