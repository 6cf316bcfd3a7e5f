"""Status of an evaluation: conditions, phase, and figures in short."""

from collections.abc import Sequence

from etude.common.api.evaluation.status import (
    EvalRunStatus,
    EvaluationResult,
    EvaluationSummary,
    SuiteResult,
)
from etude.common.api.kinds import EvalRun
from etude.operator.actions import ClockReading
from etude.operator.clock import rfc3339
from etude.operator.conditions import (
    ACCEPTED,
    ConditionFact,
    false_condition,
    is_condition_true,
    merge_conditions,
    true_condition,
)
from etude.operator.reasons import Reason

COMPLETE = "Complete"
FAILED = "Failed"


def is_over(evaluation: EvalRun) -> bool:
    """The evaluation has its result, or will never have one."""
    conditions = evaluation.status.conditions
    return any(is_condition_true(conditions, kind) for kind in (COMPLETE, FAILED))


def waiting_status(
    evaluation: EvalRun, unaccepted: ConditionFact, now: ClockReading
) -> EvalRunStatus:
    """Status of an evaluation that cannot start yet."""
    waiting = false_condition(COMPLETE, unaccepted.reason, unaccepted.message)
    return _status(evaluation, [unaccepted, waiting], "Pending", now)


def running_status(
    evaluation: EvalRun, now: ClockReading, *, trouble: str, rejected: ConditionFact | None
) -> EvalRunStatus:
    """Status of an evaluation with a Job."""
    accepted = rejected or true_condition(ACCEPTED, Reason.ACCEPTED)
    words = trouble or "its Job drives the rollouts"
    running = false_condition(COMPLETE, Reason.EVALUATING, words)
    return _status(evaluation, [accepted, running], "Running", now)


def complete_status(
    evaluation: EvalRun, result: EvaluationResult, now: ClockReading
) -> EvalRunStatus:
    """Status with the result."""
    accepted = true_condition(ACCEPTED, Reason.ACCEPTED)
    endpoint = evaluation.spec.endpoint
    policy = f"version {result.policy}" if endpoint is None else endpoint.model
    done = true_condition(COMPLETE, Reason.EVALUATED, _sentence(result, policy))
    status = _status(evaluation, [accepted, done], "Complete", now)
    found = {name: getattr(result, name) for name in EvaluationResult.model_fields}
    summary = summarise_suites(result.suites)
    over = {"summary": summary, "completion_time": rfc3339(now.wall_s)}
    return status.model_copy(update=found | over)


def failed_status(
    evaluation: EvalRun, reason: str, message: str, now: ClockReading
) -> EvalRunStatus:
    """Status of an evaluation whose Job has failed for good."""
    facts = [
        true_condition(ACCEPTED, Reason.ACCEPTED),
        false_condition(COMPLETE, reason, message),
        true_condition(FAILED, reason, message),
    ]
    status = _status(evaluation, facts, "Failed", now)
    return status.model_copy(update={"completion_time": rfc3339(now.wall_s)})


def summarise_suites(suites: Sequence[SuiteResult]) -> EvaluationSummary:
    """The figures as columns of kubectl show them, in the order of the suites."""
    best = [f"{float(each.best_of):.3f}@{each.best_of_samples}" for each in suites if each.best_of]
    return EvaluationSummary(
        suites=",".join(each.name for each in suites),
        mean=",".join("-" if each.mean is None else f"{float(each.mean):.3f}" for each in suites),
        best_of=",".join(best),
        lost=sum(each.lost for each in suites),
    )


def _sentence(result: EvaluationResult, policy: str) -> str:
    """The figures and verdicts, for the condition and its Event."""
    figures = summarise_suites(result.suites)
    text = f"{figures.suites}: mean {figures.mean} of {policy}"
    decided = [f"{each.name} {each.sentence}" for each in result.suites if each.sentence]
    return "; ".join([text, *decided])


def _status(
    evaluation: EvalRun, facts: Sequence[ConditionFact], phase: str, now: ClockReading
) -> EvalRunStatus:
    generation = evaluation.metadata.generation
    status = evaluation.status
    return status.model_copy(
        update={
            "observed_generation": generation,
            "phase": phase,
            "conditions": merge_conditions(
                facts, status.conditions, generation=generation, now=rfc3339(now.wall_s)
            ),
        }
    )
