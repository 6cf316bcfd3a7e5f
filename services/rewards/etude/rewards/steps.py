"""Grades of tasks of several steps: each step by its own tests, on the changes up to its end."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from google.protobuf.message import DecodeError

from etude.agent import patterns
from etude.common.harbor.grading_repairs import repair_grading
from etude.common.harbor.step_rewards import combine_rewards, count_steps
from etude.common.harbor.task import HarborTask, TaskStep
from etude.rewards.faults import Fault, FaultReason
from etude.rewards.functions.verifier import Grade, Submission, Verifier, make_submission
from etude.rewards.grading import GradingJob
from etude.v1 import environments_pb2, rollout_pb2


class StepJob(NamedTuple):
    """Grading of one step, for all rollouts of a group."""

    job: GradingJob
    digest: str
    brought: Mapping[str, bytes]
    """Files that this step and those before brought, and that grading would take as at first."""
    base: Submission
    """What they all brought, and no policy's change."""


def make_step_jobs(task: HarborTask, job: GradingJob, *, limit_s: float) -> Iterator[StepJob]:
    """A job for each step of a task.

    Args:
        task: with steps.
        job: of the whole task.
        limit_s: longest time of one run of the tests that the rubric allows.
    """
    brought, all_brought = dict[str, bytes](), dict[str, bytes]()
    for step in task.steps:
        tests = step.task.tests()
        brought |= _protected(step, tests)
        all_brought |= step.workdir()
        allowed = (*step.task.allowed, *map(_escape, brought))
        own = replace(step.task, allowed=allowed)
        limited = min(own.verifier_timeout_s, limit_s)
        step_job = job._replace(task=own, files=tests, limit_s=limited)
        base = environments_pb2.WorkspaceDiff()
        for path, data in all_brought.items():
            base.written.add(path=path, content=data)
        yield StepJob(step_job, own.digest(), dict(brought), make_submission(base))


def _protected(step: TaskStep, tests: Mapping[str, bytes]) -> dict[str, bytes]:
    """Files that a step brings, and that grading takes as they were at first: tests, settings."""
    matchers = [patterns.glob_matcher(each) for each in repair_grading(step.task, tests).protected]
    return {
        path: data
        for path, data in step.workdir().items()
        if any(matcher.fullmatch(path.encode()) for matcher in matchers)
    }


def _escape(path: str) -> str:
    """A pattern that matches one path."""
    return "".join(f"[{each}]" if each in "*?[{" else each for each in path)


async def grade_steps(
    verifier: Verifier,
    task: HarborTask,
    steps: Sequence[StepJob],
    rollouts: Sequence[rollout_pb2.Rollout],
) -> list[float | Fault]:
    """Grade each rollout by the steps that it has started, in order."""
    ends = [_step_ends(task, rollout) for rollout in rollouts]
    grades: list[list[float | Fault]] = [[] for _ in rollouts]

    async def grade_step(number: int) -> list[float | Fault]:
        parts = [
            each[number] for each in ends if not isinstance(each, Fault) and number < len(each)
        ]
        step = steps[number]
        laid = [_lay(each, step.brought) for each in parts]
        return await verifier.grade(step.job, step.digest, laid, base=step.base)

    graded = await asyncio.gather(*(grade_step(number) for number in range(len(steps))))
    for found in graded:
        answers = iter(found)
        for place, parts in enumerate(ends):
            if not isinstance(parts, Fault) and len(grades[place]) < len(parts):
                grades[place].append(next(answers))
    return [
        parts if isinstance(parts, Fault) else _combine(task, found)
        for parts, found in zip(ends, grades, strict=True)
    ]


def _step_ends(task: HarborTask, rollout: rollout_pb2.Rollout) -> list[rollout_pb2.Rollout] | Fault:
    """The rollout as it was at the end of each step that it has started."""
    if rollout.ending == rollout_pb2.ENDING_PLATFORM_FAULT:
        return Fault(FaultReason.ROLLOUT_FAULT, rollout.fault)
    names = [step.name for step in rollout.steps]
    if names != [step.name for step in task.steps[: len(names)]]:
        return Fault(FaultReason.ROLLOUT_FAULT, f"its steps {names[:8]} are not those of the task")
    parts = []
    for number, step in enumerate(rollout.steps, 1):
        is_last = number == len(names)
        parts.append(
            rollout_pb2.Rollout(
                rollout_id=rollout.rollout_id,
                ending=rollout.ending if is_last else rollout_pb2.ENDING_STOPPED,
                fault=rollout.fault,
                diff=rollout.diff if is_last else step.diff,
                snapshot_id=rollout.snapshot_id,
            )
        )
    return parts


def _lay(rollout: rollout_pb2.Rollout, brought: Mapping[str, bytes]) -> rollout_pb2.Rollout:
    """A rollout whose changes have protected files as its steps brought them."""
    if not brought:
        return rollout
    try:
        diff = environments_pb2.WorkspaceDiff.FromString(rollout.diff)
    except DecodeError:
        return rollout  # the verifier says so
    kept = [each for each in diff.written if each.path not in brought]
    deleted = [path for path in diff.deleted if path not in brought]
    laid = environments_pb2.WorkspaceDiff(written=kept, deleted=deleted)
    for path, data in brought.items():
        laid.written.add(path=path, content=data)
    changed = rollout_pb2.Rollout()
    changed.CopyFrom(rollout)
    changed.diff = laid.SerializeToString()
    return changed


def _combine(task: HarborTask, grades: Sequence[float | Fault]) -> float | Fault:
    rewards = list[float]()
    for grade in grades:
        if isinstance(grade, Fault):
            return grade
        rewards.append(grade)
    value = combine_rewards(task, rewards)
    last = rewards[count_steps(task, rewards) - 1] if rewards else 0.0
    return Grade(value, last.evidence) if isinstance(last, Grade) else value
