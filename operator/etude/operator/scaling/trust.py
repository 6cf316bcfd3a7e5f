"""Which plans are acted on."""

from collections.abc import Collection, Iterable

from etude.common.plans.book import is_near
from etude.operator.scaling.config import Autoscaling
from etude.operator.scaling.values import Plan


def is_current(plan: Plan, config: Autoscaling, *, now_s: float) -> bool:
    """Whether a plan still says something: its controller is heard, and its time is not over.

    What falls silent is given the grace of an idle pool before it counts as nothing; a plan that
    is over is given none, since its broker has forgotten it.
    """
    silent_s = plan.heard_s + config.predictive.plan_stale_s + config.scale_to_zero.grace_s
    return now_s <= min(silent_s, plan.until_s)


def is_reliable(plan: Plan) -> bool:
    """Whether what came was near enough to what was forecast."""
    return is_near(plan.ratio)


def usable(plans: Iterable[Plan], config: Autoscaling, *, now_s: float) -> tuple[Plan, ...]:
    """The plans to go by."""
    return tuple(
        plan for plan in plans if is_reliable(plan) and is_current(plan, config, now_s=now_s)
    )


def is_foreseen(believed: Iterable[Plan], holders: Collection[str]) -> bool:
    """Whether all demand of a pool is that of runs which say what they will ask for next.

    A plan all of whose waves have come says it, too: what comes unplanned makes it unreliable.

    Args:
        believed: the plans to go by.
        holders: runs that hold leases; one without a plan may ask for anything.
    """
    planning = {plan.run_id for plan in believed}
    return bool(planning) and planning.issuperset(holders)
