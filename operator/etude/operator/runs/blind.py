"""A run whose pods cannot be observed because the API that makes them is no longer served."""

from etude.common.api.kinds import RLRun
from etude.common.api.run.status import RLRunStatus
from etude.operator.actions import Moment
from etude.operator.clock import rfc3339
from etude.operator.conditions import Fact, conditions
from etude.operator.integrations import apis


def is_blind(run: RLRun, problem: Fact) -> bool:
    """A started run depends on an API that the cluster does not serve."""
    return run.status.resolved is not None and apis.hides_pods(problem)


def status(run: RLRun, problem: Fact, now: Moment) -> RLRunStatus:
    """The last status with the condition about the missing API."""
    others = [c for c in run.status.conditions if c.type != problem.type]
    current = conditions(
        [problem],
        run.status.conditions,
        generation=run.metadata.generation,
        now=rfc3339(now.wall_s),
    )
    return run.status.model_copy(update={"conditions": (*current, *others)})
