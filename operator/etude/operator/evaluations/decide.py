"""Decision about one evaluation: wait, run its Job, take over the result, release its pods."""

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pydantic import ValidationError

from etude.common.api.evaluation.status import EvalRunStatus, EvaluationResult
from etude.common.api.kinds import EvalRun
from etude.common.checkpoints.job import EXIT_CORRUPT
from etude.common.process import EXIT_CONFIGURATION
from etude.operator import names
from etude.operator.actions import Action, Apply, ClockReading, Decision, Delete
from etude.operator.builders.platform import Platform
from etude.operator.clock import rfc3339
from etude.operator.conditions import ConditionFact
from etude.operator.evaluations import status as statuses
from etude.operator.evaluations.acceptance import resolve_inputs
from etude.operator.evaluations.children import (
    EvaluationInputs,
    evaluation_children,
    job_ref,
    results_storage,
)
from etude.operator.evaluations.observe import ObservedEvaluation
from etude.operator.integrations.cert_manager import applicable_children
from etude.operator.kube.workload_controllers import JOB_COMPLETE, JOB_FAILED
from etude.operator.manifests import Manifest, condition, is_deleting, is_true, ref, uid
from etude.operator.pod_failures import (
    CRASHES,
    PULL_FAILURES,
    PodFailure,
    find_failures,
    unschedulable_message,
    waiting_message,
)
from etude.operator.reasons import Reason

POLL_S = 30.0
"""Time between two passes of an evaluation that cannot start: no event tells of every cause."""
MAX_RESULT = 16_384
"""Characters of a result that are read; a kubelet hands over 4,096 bytes at most."""

FAILURES = {EXIT_CONFIGURATION: Reason.INVALID_PARAMETERS, EXIT_CORRUPT: Reason.CORRUPT}
"""Reasons by the exit code of the Job's last container."""


def decide(
    evaluation: EvalRun, observed: ObservedEvaluation, now: ClockReading, platform: Platform
) -> Decision[EvalRunStatus]:
    """One pass over one evaluation. No I/O, no clock."""
    if evaluation.metadata.deletion_timestamp:
        return Decision(status=evaluation.status)  # its children go with it
    if statuses.is_over(evaluation):
        return Decision(status=evaluation.status, actions=tuple(_release(observed)))
    job = observed.children.get(job_ref(evaluation))
    ending = None if job is None else _ending_decision(evaluation, job, observed, now)
    if ending is not None:
        return ending
    inputs = resolve_inputs(evaluation, observed, platform)
    if isinstance(inputs, ConditionFact):
        if job is None:
            waiting = statuses.waiting_status(evaluation, inputs, now)
            # Engines without a Job have no deadline that ends them.
            actions = tuple(_release(observed))
            return Decision(status=waiting, actions=actions, requeue_after_s=POLL_S)
        # What has begun goes on with what it has.
        return Decision(status=_running_status(evaluation, observed, now), requeue_after_s=POLL_S)
    actions = tuple(_missing_children(evaluation, inputs, observed, platform))
    return Decision(
        status=_starting_status(evaluation, inputs, observed, now),
        actions=actions,
        requeue_after_s=POLL_S,
    )


def _missing_children(
    evaluation: EvalRun,
    inputs: EvaluationInputs,
    observed: ObservedEvaluation,
    platform: Platform,
) -> Iterator[Apply]:
    """Children that do not exist; those that do stay as they are, for one result of one spec."""
    children = evaluation_children(evaluation, inputs, platform)
    for child in applicable_children(children, observed.served):
        if ref(child) not in observed.children:
            yield Apply(manifest=child, manager=names.EVALUATION_FIELD_MANAGER)


def _starting_status(
    evaluation: EvalRun,
    inputs: EvaluationInputs,
    observed: ObservedEvaluation,
    now: ClockReading,
) -> EvalRunStatus:
    status = _running_status(evaluation, observed, now)
    began = evaluation.status.start_time or rfc3339(now.wall_s)
    results = results_storage(evaluation, inputs.run)
    return status.model_copy(update={"start_time": began, "results": results})


def _running_status(
    evaluation: EvalRun, observed: ObservedEvaluation, now: ClockReading
) -> EvalRunStatus:
    pods = [*observed.pods, *observed.job_pods]
    trouble = waiting_message(pods, PULL_FAILURES | CRASHES) or unschedulable_message(pods)
    phase = "Running" if job_ref(evaluation) in observed.children else "Starting"
    running = statuses.running_status(evaluation, now, trouble=trouble, rejected=observed.problem)
    return running.model_copy(update={"phase": phase})


def _ending_decision(
    evaluation: EvalRun, job: Manifest, observed: ObservedEvaluation, now: ClockReading
) -> Decision[EvalRunStatus] | None:
    """The decision about a Job that has ended; None while it runs."""
    release = tuple(_release(observed))
    if is_true(job, JOB_FAILED):
        failure = _failure(job, observed.job_pods)
        status = statuses.failed_status(evaluation, failure.reason, failure.message, now)
        return Decision(status=status, actions=release)
    if not is_true(job, JOB_COMPLETE):
        return None
    text = _result_text(observed.job_pods)
    if text is None:
        # Its pod was deleted first. The next Job finds every rollout, and hands the result over.
        actions = () if is_deleting(job) else (Delete(ref=ref(job), uid=uid(job)),)
        return Decision(status=_running_status(evaluation, observed, now), actions=actions)
    try:
        result = EvaluationResult.model_validate(json.loads(text[:MAX_RESULT]))
    except (ValueError, ValidationError, RecursionError):
        message = "the Job's pod ended with a message that is no result"
        status = statuses.failed_status(evaluation, Reason.EVALUATION_FAILED, message, now)
        return Decision(status=status, actions=release)
    return Decision(status=statuses.complete_status(evaluation, result, now), actions=release)


def _result_text(pods: Sequence[Manifest]) -> str | None:
    """The message with which the Job's pod ended in success; None without such a pod."""
    for pod in pods:
        if pod.get("status", {}).get("phase") != "Succeeded":
            continue
        for container in pod["status"].get("containerStatuses") or ():
            ended = (container.get("state") or {}).get("terminated") or {}
            if ended.get("exitCode") == 0:
                return str(ended.get("message", ""))
    return None


class _Failure(NamedTuple):
    reason: str
    message: str


def _failure(job: Manifest, pods: Sequence[Manifest]) -> _Failure:
    """The cause of a Job's failure: its deadline, or the end of its last pod."""
    about = condition(job, JOB_FAILED)
    if about.get("reason") == "DeadlineExceeded":
        return _Failure(Reason.DEADLINE_EXCEEDED, about.get("message", ""))
    ends = find_failures(names.EVALUATOR, pods)
    last: PodFailure | None = ends[-1] if ends else None
    if last is None:
        return _Failure(Reason.EVALUATION_FAILED, about.get("message", ""))
    code = last.exit_code
    reason = Reason.EVALUATION_FAILED if code is None else FAILURES.get(code)
    return _Failure(reason or Reason.EVALUATION_FAILED, last.message.strip())


def _release(observed: ObservedEvaluation) -> Iterator[Action]:
    """Delete what holds engines and rewards; the Job stays until its own time to live."""
    for key, live in observed.children.items():
        if key.kind == "StatefulSet" and not is_deleting(live):
            yield Delete(ref=key, uid=uid(live))
