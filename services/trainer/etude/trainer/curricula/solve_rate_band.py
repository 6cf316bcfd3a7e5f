"""Curriculum SolveRateBand: labels whose mean reward is nearest to a target first."""

from etude.common.api.meta import number
from etude.common.api.run.curriculum import SolveRateBand
from etude.trainer.curricula.base import Curriculum, CurriculumView, mean_rewards


def _order(view: CurriculumView, parameters: SolveRateBand) -> list[str]:
    target = number(parameters.target)
    rewards = mean_rewards(view.trained)
    nearest = sorted(view.untrained, key=lambda task: abs(rewards.get(task.label, target) - target))
    return [task.task_id for task in nearest]


CURRICULUM = Curriculum(parameters=SolveRateBand, order=_order)
