"""Penalty for reward hacks: signs in the record, and a judge that compares the siblings."""

from etude.common.api.run.rewards import HacksParameters
from etude.rewards.faults import Fault
from etude.rewards.functions.base import FinishedRollout, MeasuredPenalty
from etude.rewards.hacks import contrast, signs
from etude.rewards.hacks.evidence import Evidence


async def measure(rollout: FinishedRollout, parameters: HacksParameters) -> float | Fault:
    """1 for a rollout with a sign that the judge, if there is one, takes for a hack; else 0.

    The rollout stays in its batch: left out, a hack would cost nothing.
    """
    evidence = Evidence.from_rollout(
        rollout.record, rollout.originals, reads_text=parameters.reads_text
    )
    found = signs.find_signs(evidence)
    if not found:
        return 0.0
    judge = parameters.judge()
    if judge is None:
        return 1.0
    request = contrast.contrast(rollout.instruction, rollout.record, found, rollout.siblings)
    score = await rollout.ask_judge(judge, request, rollout.record)
    if isinstance(score, Fault):
        return score
    return float(score >= parameters.threshold)


FUNCTION = MeasuredPenalty(
    version=signs.VERSION, parameters=HacksParameters, measure=measure, reads_originals=True
)
