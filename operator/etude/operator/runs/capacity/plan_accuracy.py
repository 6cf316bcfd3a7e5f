"""Plan accuracy: environments that a run asked for against those that it planned."""

from collections.abc import Iterable, Mapping

from etude.common.api.kinds import EnvPool
from etude.common.plans.registry import is_accurate
from etude.operator.pools.observe import PLANNING_MODES
from etude.operator.remotes.report_store import ReportStore


def inaccurate_plans(
    book: ReportStore, run_uid: str, pools: Iterable[EnvPool]
) -> Mapping[str, float]:
    """Ratio of requested to planned environments, by the pools that ignore the run's plan.

    Args:
        book: reports of the brokers.
        run_uid: of the run that planned.
        pools: that the run uses.
    """
    ratios = {
        pool.metadata.name: plan.ratio
        for pool in pools
        if pool.spec.mode in PLANNING_MODES
        for words in book.pool(pool.metadata.uid).by_broker.values()
        for plan in words.response.plans
        if plan.run_id == run_uid
    }
    return {name: ratio for name, ratio in sorted(ratios.items()) if not is_accurate(ratio)}


def describe_inaccuracy(found: Mapping[str, float]) -> str:
    """A sentence about the pools that ignore the run's plan."""
    told = ", ".join(f"{ratio:.1f} times of them in {name}" for name, ratio in found.items())
    return f"other environments were asked for than planned ({told}): demand alone decides there"
