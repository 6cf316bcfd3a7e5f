"""Hidden tests: what counts as a reward, whose fault it is when there is none."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from etude.common.api.run.rewards import VerifierParameters
from etude.rewards.faults import Fault, FaultReason
from etude.rewards.functions.verifier import BrokenVerifier, Grade, Verifier, parse_answer
from etude.rewards.grading import GradeAnswer, GradingJob, LostGrade, MemorySandboxes
from etude.rewards.rubric import RewardValue
from etude.rewards.service import record
from etude.v1 import environments_pb2, rollout_pb2

Make = Callable[..., rollout_pb2.Rollout]


def _file(content: bytes) -> environments_pb2.GradeResponse:
    return environments_pb2.GradeResponse(reward_file=content)


def _by_content(diff: environments_pb2.WorkspaceDiff) -> GradeAnswer:
    """right passes, wrong fails, the rest is what its name says; no change fails."""
    name = diff.written[0].content.decode() if diff.written else "wrong"
    match name:
        case "right":
            return _file(b"1\n")
        case "hang":
            return environments_pb2.GradeResponse(timed_out=True)
        case "lost":
            return LostGrade("node is gone")
        case "silent":
            return environments_pb2.GradeResponse(output=b"Killed")
        case _:
            return _file(b"0\n")


def _verifier(sandboxes: MemorySandboxes, **parameters: object) -> Verifier:
    return Verifier(VerifierParameters.model_validate(parameters), sandboxes)


async def test_passing_and_failing_changes_get_one_and_zero(job: GradingJob, rollout: Make) -> None:
    verifier = _verifier(MemorySandboxes(_by_content))
    outcomes = await verifier.grade(job, "t", [rollout("right"), rollout("wrong"), rollout()])
    assert outcomes == [1.0, 0.0, 0.0]


async def test_equal_changes_of_a_group_are_graded_once(job: GradingJob, rollout: Make) -> None:
    sandboxes = MemorySandboxes(_by_content)
    rollouts = [rollout("right"), rollout("wrong"), rollout("right"), rollout("right")]
    assert await _verifier(sandboxes).grade(job, "t", rollouts) == [1.0, 0.0, 1.0, 1.0]
    assert len(sandboxes.graded) == 2


async def test_files_in_another_order_are_the_same_change(job: GradingJob, rollout: Make) -> None:
    sandboxes = MemorySandboxes(_by_content)
    rollouts = []
    for order in (("a", "b"), ("b", "a")):
        diff = environments_pb2.WorkspaceDiff(deleted=order)
        for path in order:
            diff.written.add(path=path, content=b"right")
        rollouts.append(
            rollout_pb2.Rollout(diff=diff.SerializeToString(), ending=rollout_pb2.ENDING_STOPPED)
        )
    await _verifier(sandboxes).grade(job, "t", rollouts)
    assert len(sandboxes.graded) == 1


async def test_the_same_changes_of_the_same_task_are_remembered(
    job: GradingJob, rollout: Make
) -> None:
    sandboxes = MemorySandboxes(_by_content)
    verifier = _verifier(sandboxes)
    for digest, graded in (("t", 1), ("t", 1), ("another task", 2)):
        assert await verifier.grade(job, digest, [rollout("right")]) == [1.0]
        assert len(sandboxes.graded) == graded


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nan",
        b"inf",
        b"-inf",
        b"1e309",
        b"1 or 1",
        b"1_0",
        b"2",
        b"-1",
        b"True",
        "\u0661".encode(),
        b"1" * 70_000,
    ],
)
def test_a_reward_file_without_one_number_from_zero_to_one_is_no_reward(content: bytes) -> None:
    assert isinstance(parse_answer(_file(content)), BrokenVerifier)


@pytest.mark.parametrize(("content", "value"), [(b"1", 1.0), (b" 0.25\n", 0.25), (b"5e-1", 0.5)])
def test_a_reward_file_with_one_number_is_that_reward(content: bytes, value: float) -> None:
    assert parse_answer(_file(content)) == value


@pytest.mark.parametrize("breaks", ["hang", "silent"])
async def test_changes_that_break_the_verifier_are_the_policys_fault(
    breaks: str, job: GradingJob, rollout: Make
) -> None:
    sandboxes = MemorySandboxes(_by_content)
    outcomes = await _verifier(sandboxes).grade(job, "t", [rollout(breaks), rollout("right")])
    assert outcomes == [0.0, 1.0]
    assert len(sandboxes.graded) == 3, "the unmodified repository was graded as evidence"


async def test_a_verifier_that_breaks_on_the_base_too_is_a_platform_fault(
    job: GradingJob, rollout: Make
) -> None:
    sandboxes = MemorySandboxes(lambda _: environments_pb2.GradeResponse(timed_out=True))
    outcomes = await _verifier(sandboxes).grade(job, "t", [rollout("right"), rollout()])
    assert [o.reason for o in outcomes if isinstance(o, Fault)] == [FaultReason.GRADER_ERROR] * 2


async def test_a_verifier_that_broke_once_is_asked_again(job: GradingJob, rollout: Make) -> None:
    busy = environments_pb2.GradeResponse(timed_out=True)
    answers: Iterator[GradeAnswer] = iter([busy, busy, _file(b"1")])
    verifier = _verifier(MemorySandboxes(lambda _: next(answers)))
    (first,) = await verifier.grade(job, "t", [rollout("right")])
    assert isinstance(first, Fault)
    assert await verifier.grade(job, "t", [rollout("right")]) == [1.0]


async def test_nothing_is_graded_after_the_deadline(job: GradingJob, rollout: Make) -> None:
    sandboxes = MemorySandboxes(_by_content)
    late = job._replace(deadline_s=0.0)
    (outcome,) = await _verifier(sandboxes).grade(late, "t", [rollout("right")])
    assert isinstance(outcome, Fault)
    assert outcome.reason is FaultReason.ENVIRONMENT_LOST
    assert not sandboxes.graded


async def test_a_lost_environment_is_tried_again_and_then_a_fault_never_zero(
    job: GradingJob, rollout: Make
) -> None:
    sandboxes = MemorySandboxes(_by_content)
    outcomes = await _verifier(sandboxes, retries=2).grade(
        job, "t", [rollout("lost"), rollout("right")]
    )
    assert outcomes == [Fault(FaultReason.ENVIRONMENT_LOST, "node is gone"), 1.0]
    assert len(sandboxes.graded) == 4, "right once, lost three times"


async def test_a_lost_environment_that_comes_back_gives_the_reward(
    job: GradingJob, rollout: Make
) -> None:
    answers: Iterator[GradeAnswer] = iter([LostGrade("restarting"), _file(b"1")])
    verifier = _verifier(MemorySandboxes(lambda _: next(answers)))
    assert await verifier.grade(job, "t", [rollout("right")]) == [1.0]


async def test_a_platform_fault_of_the_rollout_stays_one(job: GradingJob, rollout: Make) -> None:
    sandboxes = MemorySandboxes(_by_content)
    outcomes = await _verifier(sandboxes).grade(
        job, "t", [rollout("right", rollout_pb2.ENDING_PLATFORM_FAULT)]
    )
    assert isinstance(outcomes[0], Fault)
    assert not sandboxes.graded


async def test_an_unfinished_rollout_gets_zero_unseen_when_only_finished_ones_count(
    job: GradingJob, rollout: Make
) -> None:
    sandboxes = MemorySandboxes(_by_content)
    late = rollout("right", rollout_pb2.ENDING_TURN_LIMIT)
    assert await _verifier(sandboxes).grade(job, "t", [late]) == [1.0]
    assert await _verifier(sandboxes, onlyWhenFinished=True).grade(job, "t", [late]) == [0.0]
    assert len(sandboxes.graded) == 1


async def test_a_change_that_is_too_large_failed_and_is_not_graded(job: GradingJob) -> None:
    sandboxes = MemorySandboxes(_by_content)
    ending = rollout_pb2.ENDING_CHANGE_TOO_LARGE
    large = rollout_pb2.Rollout(ending=ending, fault="more than 64 MiB")
    assert await _verifier(sandboxes).grade(job, "t", [large]) == [0.0]
    assert not sandboxes.graded


async def test_a_diff_that_cannot_be_read_is_masked(job: GradingJob) -> None:
    broken = rollout_pb2.Rollout(diff=b"\xff\xff", ending=rollout_pb2.ENDING_STOPPED)
    outcomes = await _verifier(MemorySandboxes(_by_content)).grade(job, "t", [broken])
    assert isinstance(outcomes[0], Fault)


async def test_a_reward_says_how_it_was_found_out(job: GradingJob, rollout: Make) -> None:
    evidence = environments_pb2.GradeEvidence(
        mode=environments_pb2.GRADE_MODE_CLEAN,
        driver="process",
        isolation=environments_pb2.ISOLATION_WEAK,
    )

    def answered(diff: environments_pb2.WorkspaceDiff) -> GradeAnswer:
        answer = _by_content(diff)
        if isinstance(answer, environments_pb2.GradeResponse):
            answer.evidence.CopyFrom(evidence)
        return answer

    outcomes = await _verifier(MemorySandboxes(answered)).grade(
        job, "t", [rollout("right"), rollout("silent")]
    )

    assert outcomes == [1.0, 0.0]
    for outcome in outcomes:
        assert isinstance(outcome, Grade)
        assert outcome.evidence == evidence
        value = RewardValue(1.0, outcome, ())
        assert record(rollout_pb2.Rollout(), value).evidence == evidence
    assert not record(rollout_pb2.Rollout(), RewardValue(0.0, 0.0, ())).HasField("evidence")


async def test_a_fork_is_graded_once_and_one_that_was_not_saved_is_masked(
    job: GradingJob, rollout: Make
) -> None:
    forked = job._replace(task=replace(job.task, is_graded_in_fork=True))
    sandboxes = MemorySandboxes(_by_content)
    rollouts = [rollout("right"), rollout("right"), rollout("right")]
    for each, snapshot_id in zip(rollouts, ("end-1", "end-2", ""), strict=True):
        each.snapshot_id = snapshot_id
    verifier = _verifier(sandboxes)

    for _ in range(2):
        outcomes = await verifier.grade(forked, "t", rollouts)
        assert outcomes[:2] == [1.0, 1.0]
        assert isinstance(outcomes[2], Fault)
        assert len(sandboxes.graded) == 2, "equal diffs, but what services hold may differ"


async def test_equal_changes_are_graded_once_on_a_set_up_and_without_its_snapshot_if_it_is_lost(
    job: GradingJob, rollout: Make
) -> None:
    answers: Iterator[GradeAnswer] = iter([LostGrade("no host holds it"), _file(b"1")])
    sandboxes = MemorySandboxes(lambda _: next(answers))
    rollouts = [rollout("right"), rollout("right")]
    for each, snapshot_id in zip(rollouts, ("group-1", "group-2"), strict=True):
        each.snapshot_id = snapshot_id

    assert await _verifier(sandboxes).grade(job, "t", rollouts) == [1.0, 1.0]
    first, second = sandboxes.snapshot_ids
    assert first in {"group-1", "group-2"}
    assert second == ""
