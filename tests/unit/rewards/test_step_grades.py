"""Grades of tasks of several steps: each by its own tests, on what was changed by its end."""

import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from etude.common.api.run.rewards import VerifierParameters
from etude.common.harbor import task as harbor_task
from etude.common.harbor.task import HarborTask
from etude.rewards import steps
from etude.rewards.faults import Fault
from etude.rewards.functions.verifier import Verifier
from etude.rewards.grading import GradingJob, MemorySandboxes
from etude.v1 import environments_pb2, rollout_pb2

TEST = "echo 1 > /logs/verifier/reward.txt\n"
FILES: Mapping[str, str] = {
    "task.toml": "[[steps]]\nname = 'bake'\n[[steps]]\nname = 'ice'\n",
    "instruction.md": "All of it.\n",
    "environment/kitchen.txt": "an oven\n",
    "tests/test.sh": TEST,
    "steps/bake/instruction.md": "Bake a cake.\n",
    "steps/ice/instruction.md": "Ice it.\n",
    "steps/ice/workdir/sugar.txt": "sweet\n",
    "steps/ice/workdir/conftest.py": "x = 1\n",
    "steps/ice/tests/test.sh": f"#!/bin/bash\n{TEST}",
}


@pytest.fixture
def task(tmp_path: Path) -> HarborTask:
    for path, text in FILES.items():
        target = tmp_path / "cake" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return harbor_task.read_task(tmp_path / "cake")


def change(**written: str) -> bytes:
    diff = environments_pb2.WorkspaceDiff()
    for path, text in sorted(written.items()):
        diff.written.add(path=path.replace("__", "."), content=text.encode())
    return diff.SerializeToString()


def made(
    *diffs: bytes, ending: rollout_pb2.Ending = rollout_pb2.ENDING_STOPPED
) -> rollout_pb2.Rollout:
    """A rollout that has started as many steps as there are changes."""
    started = [
        rollout_pb2.RolloutStep(name=name, diff=diff)
        for name, diff in zip(("bake", "ice"), diffs, strict=False)
    ]
    if started:
        started[-1].ClearField("diff")
    return rollout_pb2.Rollout(
        rollout_id="r", steps=started, diff=diffs[-1] if diffs else b"", ending=ending
    )


def reward(diff: environments_pb2.WorkspaceDiff) -> environments_pb2.GradeResponse:
    """What a cake is worth: its layers."""
    texts = {each.path: each.content for each in diff.written}
    return environments_pb2.GradeResponse(reward_file=texts.get("cake", b"0"))


async def graded(
    task: HarborTask, sandboxes: MemorySandboxes, *rollouts: rollout_pb2.Rollout
) -> list[float | Fault]:
    job = GradingJob(task, "file:///t", "repos", {}, 5.0, time.monotonic() + 60)
    jobs = list(steps.make_step_jobs(task, job, limit_s=600))
    verifier = Verifier(VerifierParameters(), sandboxes)
    return await steps.grade_steps(verifier, task, jobs, rollouts)


async def test_steps_are_graded_by_the_change_at_their_end(task: HarborTask) -> None:
    found = await graded(
        task,
        MemorySandboxes(reward),
        made(change(cake="1"), change(cake="0.5")),
        made(change(cake="1")),
        made(change(cake="0"), change(cake="1")),
        made(),
    )
    assert found == [0.75, 0.5, 0.5, 0.0]


async def test_protected_files_count_as_their_step_brought_them(task: HarborTask) -> None:
    sandboxes = MemorySandboxes(reward)
    mine = change(cake="1", conftest__py="cheat = 1\n", sugar__txt="salt\n")
    await graded(task, sandboxes, made(mine, mine))
    first, second = sorted(sandboxes.graded, key=lambda diff: len(diff.written[-1].content))
    texts = [{f.path: f.content for f in diff.written} for diff in (first, second)]
    as_brought = next(each for each in texts if each["conftest.py"] == b"x = 1\n")
    assert as_brought["sugar.txt"] == b"salt\n", "what tests do not use is the agent's"
    assert [each["conftest.py"] for each in texts if each is not as_brought] == [b"cheat = 1\n"]


async def test_the_job_of_a_step_allows_only_the_protected_files_that_steps_brought(
    task: HarborTask,
) -> None:
    job = GradingJob(task, "file:///t", "repos", {}, 5.0, time.monotonic() + 60)
    bake, ice = steps.make_step_jobs(task, job, limit_s=600)
    assert (bake.job.task.allowed, ice.job.task.allowed) == ((), ("conftest.py",))
    assert ice.job.files["test.sh"].startswith(b"#!/bin/bash")


@pytest.mark.parametrize(
    ("rollout", "what"),
    [
        (made(ending=rollout_pb2.ENDING_PLATFORM_FAULT), ""),
        (
            rollout_pb2.Rollout(steps=[rollout_pb2.RolloutStep(name="ice")]),
            "are not those of the task",
        ),
        (made(b"\xff", change(cake="1")), "cannot be read"),
    ],
)
async def test_what_the_platform_broke_is_a_fault(
    rollout: rollout_pb2.Rollout, what: str, task: HarborTask
) -> None:
    (found,) = await graded(task, MemorySandboxes(reward), rollout)
    assert isinstance(found, Fault)
    assert what in found.message


async def test_a_policy_that_breaks_the_tests_of_a_step_earns_nothing_with_them(
    task: HarborTask,
) -> None:
    """Blame is found on what steps brought: without it these tests break by themselves."""

    def broken(diff: environments_pb2.WorkspaceDiff) -> environments_pb2.GradeResponse:
        texts = {each.path: each.content for each in diff.written}
        if texts.get("sugar.txt") == b"sweet\n" or "cake" in texts:
            return reward(diff)
        return environments_pb2.GradeResponse(output=b"no sugar")

    salted = change(sugar__txt="salt\n")
    found = await graded(task, MemorySandboxes(broken), made(change(cake="1"), salted))
    assert found == [0.5]


async def test_a_change_too_large_is_worth_nothing(task: HarborTask) -> None:
    late = made(ending=rollout_pb2.ENDING_CHANGE_TOO_LARGE)
    assert await graded(task, MemorySandboxes(reward), late) == [0.0]
