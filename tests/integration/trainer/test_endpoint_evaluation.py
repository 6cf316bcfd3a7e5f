"""Evaluation of a model at an endpoint: same tasks and grades, no tokens, faults kept apart."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.trainer.scripted_endpoint import (
    DONE,
    READ,
    ScriptedEndpoint,
    call_turn,
    serve_endpoint,
)

from etude.common.api.evaluation.spec import EvaluatedEndpoint
from etude.common.api.run.phases import TaskSet
from etude.common.api.run.rollout_policy import RolloutPolicy
from etude.common.api.storage import Storage
from etude.common.errors import UserError
from etude.common.evaluation.row_comparison import compare_rows, metric_rule
from etude.common.run_folder.record import FolderRecord
from etude.trainer.commands.evaluate import EvaluationJob, evaluate
from etude.trainer.rollouts import endpoint_policy

NUM_TASKS = 2
FULL = {"error": {"code": "context_length_exceeded", "message": "This model's maximum is 8192"}}


@pytest.fixture
def endpoint() -> Iterator[ScriptedEndpoint]:
    with serve_endpoint() as served:
        yield served


@pytest.fixture
def job(partners: Any, endpoint: ScriptedEndpoint, tmp_path: Path) -> EvaluationJob:
    for number in range(NUM_TASKS):
        folder = tmp_path / "suite" / f"fix-{number}"
        folder.mkdir(parents=True)
        (folder / "instruction.md").write_text(f"Fix number {number}.\n")
        (folder / "task.toml").write_text("")
    partners.rewards.values = (1.0, 0.0)
    target = partners.target
    limits = {"toolset": "Compact", "tool_format": "Native", "timeout_seconds": 30, "retries": 0}
    return EvaluationJob(
        name="held-out",
        uid="evaluation-7",
        endpoint=EvaluatedEndpoint(url=endpoint.url, model="others-7b"),
        tasks=TaskSet(name="suite", uri=f"file://{tmp_path}/suite", environment="repos"),
        samples=2,
        rollout=RolloutPolicy.model_validate(limits),
        broker=target,
        template="python",
        rewards=target,
        outage_seconds=1,
        storage=Storage(uri=f"file://{tmp_path}/results"),
    )


def _rows(tmp_path: Path) -> list[dict[str, Any]]:
    return list(FolderRecord(tmp_path / "results").rollouts(0, "eval-held-out"))


async def test_an_endpoint_is_graded_as_a_checkpoint_and_has_no_figures_of_tokens(
    job: EvaluationJob, endpoint: ScriptedEndpoint, partners: Any, tmp_path: Path
) -> None:
    summary = await evaluate(job, key="of-ours")
    assert (summary["success"], summary["best_of"], summary["lost"]) == (0.5, {"2": 1.0}, 0)
    assert summary["policy"] == "others-7b"
    assert "length_mean" not in summary
    rows = _rows(tmp_path)
    assert [row["success"] for row in rows] == [1.0, 0.0] * NUM_TASKS
    unknown = {"tokens", "read_tokens", "sampled_tokens", "oldest", "newest"}
    assert not any(unknown & row.keys() for row in rows)
    assert {row["ending"] for row in rows} == {"stopped"}
    assert {call["name"] for row in rows for call in row["calls"]} == {"read_file"}
    # The tests graded what the calls left behind.
    assert {bytes(r.diff) for each in partners.rewards.requests for r in each.rollouts} == {
        b"the diff"
    }
    assert set(endpoint.keys) == {"Bearer of-ours"}
    stored = b"".join(path.read_bytes() for path in (tmp_path / "results").rglob("*.*"))
    assert b"of-ours" not in stored


async def test_the_endpoint_gets_tools_instruction_and_results_in_the_protocols_form(
    job: EvaluationJob, endpoint: ScriptedEndpoint
) -> None:
    await evaluate(job.model_copy(update={"samples": 1, "limit": 1}))
    first, second = endpoint.requests
    assert [each["role"] for each in first["messages"]] == ["system", "user"]
    assert first["messages"][1]["content"] == "Fix number 0."
    assert "read_file" in {each["function"]["name"] for each in first["tools"]}
    assert (first["model"], first["temperature"]) == ("others-7b", 1.0)
    assert first["seed"] != second["seed"]
    call, result = second["messages"][2:]
    assert call["tool_calls"][0]["function"] == READ["tool_calls"][0]["function"]
    assert (result["role"], result["tool_call_id"]) == ("tool", "call-1")
    assert result["content"]


async def test_the_endpoints_own_counts_of_sampled_tokens_are_taken(
    job: EvaluationJob, endpoint: ScriptedEndpoint, tmp_path: Path
) -> None:
    endpoint.usage = True
    await evaluate(job)
    rows = _rows(tmp_path)
    assert {row["sampled_tokens"] for row in rows} == {14}
    assert not any("read_tokens" in row for row in rows)


async def test_a_transcript_may_have_no_more_tokens_than_any_other(
    job: EvaluationJob, endpoint: ScriptedEndpoint, tmp_path: Path
) -> None:
    endpoint.usage = True
    endpoint.turns = (READ, READ, DONE)
    limits = job.rollout.model_copy(update={"max_tokens": 127})
    await evaluate(job.model_copy(update={"rollout": limits}))
    assert {row["ending"] for row in _rows(tmp_path)} == {"length_limit"}


async def test_a_busy_endpoint_is_asked_again_and_costs_no_rollout(
    job: EvaluationJob, endpoint: ScriptedEndpoint
) -> None:
    endpoint.refusals = [(429, b"{}"), (503, b"busy"), (0, b"")]
    summary = await evaluate(job.model_copy(update={"outage_seconds": 60}))
    assert (summary["lost"], summary["success"]) == (0, 0.5)
    assert len(endpoint.requests) == 3 + 2 * 2 * NUM_TASKS


@pytest.mark.parametrize(
    "answer",
    [
        b"[" * 100_000,
        b'{"choices": [{"message": {"content": 7}, "finish_reason": "stop"}]}',
        json.dumps({"choices": [{"message": {"tool_calls": [{}]}, "finish_reason": "x"}]}).encode(),
        b'{"choices": [{"message": {"content": "\\ud800"}, "finish_reason": "stop"}], "usage": 3}',
        b"x" * (endpoint_policy.MAX_TURN_BYTES + 1),
    ],
)
async def test_answers_that_are_no_turn_lose_rollouts_and_never_score_zero(
    job: EvaluationJob, endpoint: ScriptedEndpoint, answer: bytes, tmp_path: Path
) -> None:
    endpoint.refuse = lambda _: (200, answer)
    summary = await evaluate(job.model_copy(update={"samples": 1, "limit": 1}))
    assert summary["lost"] == 1
    assert "success" not in summary
    (row,) = _rows(tmp_path)
    assert "success" not in row
    assert "endpoint http://127.0.0.1" in row["fault"]


async def test_arguments_that_are_no_json_are_the_policys_fault(
    job: EvaluationJob, endpoint: ScriptedEndpoint, tmp_path: Path
) -> None:
    endpoint.turns = (call_turn("read_file", '{"path": '), DONE)
    summary = await evaluate(job)
    assert summary["lost"] == 0
    assert {call["is_malformed"] for row in _rows(tmp_path) for call in row["calls"]} == {True}
    # Servers render the history with a template, which takes JSON objects alone.
    said = endpoint.requests[-1]["messages"][2]["tool_calls"][0]["function"]
    assert json.loads(said["arguments"]) == {"raw": '{"path": '}


async def test_a_conversation_that_the_model_has_no_room_for_ends_at_its_length(
    job: EvaluationJob, endpoint: ScriptedEndpoint, tmp_path: Path
) -> None:
    full = 400, json.dumps(FULL).encode()
    endpoint.refuse = lambda body: full if len(body["messages"]) > 2 else None
    summary = await evaluate(job)
    assert (summary["lost"], summary["success"]) == (0, 0.5)
    assert {row["ending"] for row in _rows(tmp_path)} == {"length_limit"}


@pytest.mark.parametrize("status", [400, 401, 403, 404])
async def test_an_endpoint_that_refuses_all_requests_ends_the_evaluation(
    job: EvaluationJob, endpoint: ScriptedEndpoint, status: int
) -> None:
    words = json.dumps({"error": {"message": "no such model"}}).encode()
    endpoint.refuse = lambda _: (status, words)
    with pytest.raises(UserError, match=rf"others-7b with status {status}: no such model") as error:
        await evaluate(job, key="of-ours")
    assert "of-ours" not in str(error.value)


async def test_a_key_does_not_leave_the_machine_in_the_clear(job: EvaluationJob) -> None:
    remote = EvaluatedEndpoint(url="http://models.example.com/v1", model="others-7b")
    with pytest.raises(UserError, match="would get its key unencrypted") as error:
        await evaluate(job.model_copy(update={"endpoint": remote}), key="of-ours")
    assert "of-ours" not in str(error.value)


async def test_a_refused_conversation_of_a_working_endpoint_is_lost_alone(
    job: EvaluationJob, endpoint: ScriptedEndpoint, tmp_path: Path
) -> None:
    def refuse(body: Any) -> tuple[int, bytes] | None:
        is_one = "number 1" in body["messages"][1]["content"] and len(body["messages"]) > 2
        return (400, b"filtered") if is_one else None

    endpoint.refuse = refuse
    summary = await evaluate(job)
    assert (summary["lost"], summary["count"]) == (2, 2)
    faults = [row["fault"] for row in _rows(tmp_path) if "fault" in row]
    assert all(each.endswith("answered 400: filtered") for each in faults)


async def test_a_finished_endpoint_evaluation_is_not_paid_for_twice(
    job: EvaluationJob, endpoint: ScriptedEndpoint
) -> None:
    first = await evaluate(job)
    asked = len(endpoint.requests)
    assert await evaluate(job) == first
    assert len(endpoint.requests) == asked
    other = EvaluatedEndpoint(url=endpoint.url, model="others-70b")
    with pytest.raises(UserError, match="another job"):
        await evaluate(job.model_copy(update={"endpoint": other}))


async def test_a_reward_that_counts_tokens_is_left_out_and_success_is_compared(
    job: EvaluationJob, model_folder: Path, partners: Any, tmp_path: Path
) -> None:
    summary = await evaluate(job.model_copy(update={"reward_counts_tokens": True}))
    assert "reward_mean" not in summary
    rows = _rows(tmp_path)
    assert not any("reward" in row for row in rows)
    served = {
        **job.model_dump(exclude={"endpoint"}),
        "policy": "1.3",
        "model": model_folder.as_uri(),
        "engines": (partners.target,),
        "storage": Storage(uri=f"file://{tmp_path}/served"),
    }
    served["rollout"]["tool_format"] = "Xml"
    await evaluate(EvaluationJob.model_validate(served))
    ours = list(FolderRecord(tmp_path / "served").rollouts(0, "eval-held-out"))
    rules = [metric_rule(name, 0.5) for name in ("success", "reward")]
    found = compare_rows(rows, ours, rules, min_tasks=1)
    assert found.differences["success"].difference == 0.0
    assert "reward" not in found.differences
    assert found.decision.verdict.value == "NotEnoughData"


def test_a_job_names_engines_or_an_endpoint(job: EvaluationJob) -> None:
    wrongs: tuple[dict[str, Any], ...] = ({"policy": "1.3"}, {"endpoint": None})
    for wrong in wrongs:
        with pytest.raises(ValueError, match="or endpoint alone"):
            EvaluationJob.model_validate({**job.model_dump(), **wrong})
