"""Usable plans: current ones whose forecast has been accurate."""

from collections.abc import Collection, Iterable

from etude.common.plans.registry import is_near
from etude.operator.pools.autoscaling.config import Autoscaling
from etude.operator.pools.autoscaling.values import Plan


def is_current(plan: Plan, config: Autoscaling, *, now_s: float) -> bool:
    """The plan is current: its controller reports, and its horizon is not over.

    A silent plan gets the grace period of an idle pool; a plan that is over gets none, since its
    broker has dropped it.
    """
    silent_s = plan.heard_s + config.predictive.plan_stale_s + config.scale_to_zero.grace_s
    return now_s <= min(silent_s, plan.until_s)


def is_reliable(plan: Plan) -> bool:
    """Observed demand was near enough to the forecast."""
    return is_near(plan.ratio)


def usable(plans: Iterable[Plan], config: Autoscaling, *, now_s: float) -> tuple[Plan, ...]:
    """Plans that are reliable and current."""
    return tuple(
        plan for plan in plans if is_reliable(plan) and is_current(plan, config, now_s=now_s)
    )


def is_foreseen(believed: Iterable[Plan], holders: Collection[str]) -> bool:
    """All demand of a pool comes from runs with a usable plan.

    A plan without further waves counts too: unplanned demand would make it unreliable.

    Args:
        believed: usable plans.
        holders: runs that hold leases; one without a plan may ask for anything.
    """
    planning = {plan.run_id for plan in believed}
    return bool(planning) and planning.issuperset(holders)
