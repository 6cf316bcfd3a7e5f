"""Service level: probability that the ready replicas suffice."""

from collections.abc import Iterable

from etude.common.plans.forecast import Assurance, assurance
from etude.operator.pools.autoscaling.config import Autoscaling
from etude.operator.pools.autoscaling.provisioning import Provision
from etude.operator.pools.autoscaling.values import Plan

LEAST, MOST = 0.5, 0.999
"""Below one half the forecast's own mean would be undercut; no distribution is known beyond."""


def service_level(config: Autoscaling, plans: Iterable[Plan], provision: Provision) -> Assurance:
    """The newsvendor's level where costs and waiting GPUs are known, else the one that is set.

    One environment too few makes a run's GPUs wait until it is provisioned; one too many is kept
    for the scale-down delay.
    """
    gpus = max((plan.gpus for plan in plans), default=0)
    costs = config.predictive.costs
    if costs is None or not gpus:
        return assurance(config.predictive.service_level_percent / 100)
    under = gpus * costs.gpu_second * provision.p50_s
    over = costs.sandbox_second * config.scale_down_delay_s
    share = under / (under + over) if under + over > 0 else LEAST
    return assurance(min(MOST, max(LEAST, share)))
