"""Scoring of a group with functions that run something, and with a price of questions."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from tests.unit.rewards.test_judge import ScriptedJudge, vote

from etude.common.api.run.rewards import VerifierParameters
from etude.common.api.run.roles import RewardFunction
from etude.common.api.storage import Storage
from etude.rewards.faults import Fault, FaultReason
from etude.rewards.functions.verifier import Verifier
from etude.rewards.grading import MemorySandboxes
from etude.rewards.judge_client import JudgeClient
from etude.rewards.rubric import RewardValue, Rubric
from etude.rewards.scoring import Scorer
from etude.rewards.service import record_parts
from etude.v1 import environments_pb2, rollout_pb2

Make = Callable[..., rollout_pb2.Rollout]


def scorer(folder: Path, *functions: dict[str, object]) -> Scorer:
    rows = [{"name": "tests", "function": "Verifier"}, *functions]
    rubric = Rubric.from_functions([RewardFunction.model_validate(row) for row in rows])
    passed = environments_pb2.GradeResponse(reward_file=b"1")
    verifier = Verifier(VerifierParameters(), MemorySandboxes(lambda _diff: passed))
    judge = JudgeClient(retry_s=0)
    return Scorer(rubric, verifier, Storage(uri=folder.as_uri()), folder / "scratch", judge)


async def rewards(
    chosen: Scorer, task: Path, *rollouts: rollout_pb2.Rollout
) -> list[RewardValue | Fault]:
    deadline_s = time.monotonic() + 30
    return await chosen.score(task.as_uri(), "repos", rollouts, deadline_s=deadline_s)


async def test_style_is_measured_against_the_first_files_of_the_task(
    tmp_path: Path, task_folder: Path, rollout: Make
) -> None:
    limits = {"freeLines": 1, "maxLines": 2, "weights": {"lints": 0, "formatting": 0}}
    style: dict[str, object] = {"name": "style", "function": "Style", "parameters": limits}
    same, larger = await rewards(
        scorer(tmp_path, style), task_folder, rollout("x = 1\n"), rollout("x = 1\ny = 2\nz = 3\n")
    )
    assert isinstance(same, RewardValue)
    assert isinstance(larger, RewardValue)
    assert (same.reward, larger.reward) == (1.0, 0.5)


async def test_a_style_that_is_not_measured_by_the_deadline_is_a_fault(
    tmp_path: Path, task_folder: Path, rollout: Make
) -> None:
    chosen = scorer(tmp_path, {"name": "style", "function": "Style"})
    job = chosen._task(task_folder.as_uri(), "p", time.monotonic() - 1).job
    late = await chosen._score(rollout("x=2\n"), 1.0, job, {}, [])
    assert isinstance(late, Fault)
    assert late.reason is FaultReason.GRADER_ERROR


async def test_a_judge_scores_each_rollout_and_masks_those_without_an_answer(
    tmp_path: Path, task_folder: Path, rollout: Make
) -> None:
    def answer(body: dict[str, object]) -> tuple[int, bytes]:
        return (200, vote(0.75)) if "good" in str(body["messages"]) else (401, b"")

    with ScriptedJudge(answer).serve() as server:
        asked = {"endpoint": server.url, "model": "m", "criteria": "c", "votes": 1}
        judge: dict[str, object] = {"name": "j", "function": "Judge", "parameters": asked}
        good, bad = await rewards(
            scorer(tmp_path, judge), task_folder, rollout("good"), rollout("other")
        )
    assert isinstance(good, RewardValue)
    assert good.reward == pytest.approx(0.75)
    assert isinstance(bad, Fault)
    assert bad.reason is FaultReason.JUDGE_FAILED
    record_parts([good, bad])
    assert REGISTRY.get_sample_value("etude_reward_part", {"name": "j"}) == pytest.approx(-0.25)


async def test_the_ambiguity_of_a_task_is_the_discount_of_a_question(
    tmp_path: Path, task_folder: Path, rollout: Make
) -> None:
    settings = task_folder / "task.toml"
    settings.write_text(settings.read_text() + "[metadata]\netude_ambiguity = 0.5\n")
    price: dict[str, object] = {"name": "ask", "function": "Deferral", "weight": "0.4"}
    asked = rollout()
    asked.final_message = "Which one?"
    worked, question = await rewards(
        scorer(tmp_path, price), task_folder, rollout("x = 2\n"), asked
    )
    assert isinstance(worked, RewardValue)
    assert isinstance(question, RewardValue)
    assert worked.reward == 1
    assert question.reward == pytest.approx(1 - 0.4 * 0.5)
