"""An evaluation without a run: the same figures, each rollout once, whatever kills it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from etude.common.api.run.phases import TaskSet
from etude.common.api.run.rollout_policy import RolloutPolicy
from etude.common.api.storage import Storage
from etude.common.errors import CorruptError, StoreError, UserError
from etude.common.run_folder.record import FolderRecord
from etude.trainer.commands import evaluate as program
from etude.trainer.commands.evaluate import EvaluationJob, evaluate
from etude.trainer.rollouts.suites.results import SuiteResults
from etude.v1 import weights_pb2

NUM_TASKS = 3
NUM_SAMPLES = 2


@pytest.fixture
def job(partners: Any, model_folder: Path, tmp_path: Path) -> EvaluationJob:
    for number in range(NUM_TASKS):
        folder = tmp_path / "suite" / f"fix-{number}"
        folder.mkdir(parents=True)
        (folder / "instruction.md").write_text(f"Fix number {number}.\n")
        (folder / "task.toml").write_text("")
    partners.rewards.values = (1.0, 0.0)
    target = partners.target
    return EvaluationJob(
        name="held-out",
        uid="evaluation-7",
        policy="1.3",
        model=model_folder.as_uri(),
        tasks=TaskSet(name="suite", uri=f"file://{tmp_path}/suite", environment="repos"),
        samples=NUM_SAMPLES,
        rollout=RolloutPolicy(toolset="Compact", max_tokens=600, timeout_seconds=20, retries=0),
        engines=(target,),
        broker=target,
        template="python",
        rewards=target,
        outage_seconds=5,
        storage=Storage(uri=f"file://{tmp_path}/results"),
    )


def _samples(tmp_path: Path) -> dict[str, bytes]:
    folder = tmp_path / "results" / "samples"
    return {path.name: path.read_bytes() for path in folder.glob("*.pb")}


async def test_every_task_is_sampled_and_figures_and_rows_are_stored(
    job: EvaluationJob, tmp_path: Path
) -> None:
    summary = await evaluate(job)
    assert (summary["success"], summary["best_of"]) == (0.5, {"2": 1.0})
    assert (summary["count"], summary["lost"], summary["policy"]) == (6, 0, "1.3")
    assert json.loads((tmp_path / "results/result.json").read_text()) == summary
    rows = list(FolderRecord(tmp_path / "results").rollouts(0, "eval-held-out"))
    assert [(row["task_id"], row["reward"]) for row in rows] == [
        (f"suite/fix-{number}", reward) for number in range(NUM_TASKS) for reward in (1.0, 0.0)
    ]
    assert {row["newest"] for row in rows} == {"1.3"}


async def test_a_finished_evaluation_is_not_run_again(job: EvaluationJob, partners: Any) -> None:
    first = await evaluate(job)
    asked = len(partners.engine.requests)
    assert await evaluate(job) == first
    assert len(partners.engine.requests) == asked


async def test_a_killed_evaluation_goes_on_with_what_is_missing(
    job: EvaluationJob, partners: Any, tmp_path: Path
) -> None:
    # Two calls a rollout: the groups of some tasks end, and the rest wait.
    partners.engine.holds_after = 10
    running = asyncio.create_task(evaluate(job))
    async with asyncio.timeout(60):
        while not _samples(tmp_path):  # noqa: ASYNC110 - written by a thread
            await asyncio.sleep(0.02)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    before = _samples(tmp_path)
    assert 0 < len(before) < NUM_TASKS * NUM_SAMPLES
    partners.engine.holds_after, asked = None, len(partners.engine.requests)
    summary = await evaluate(job)
    after = _samples(tmp_path)
    assert (summary["count"], summary["lost"], len(after)) == (6, 0, 6)
    assert {name: after[name] for name in before} == before
    again = {request.episode for request in partners.engine.requests[asked:]}
    assert again == {name.removesuffix(".pb") for name in after.keys() - before.keys()}


async def test_rollouts_of_another_version_do_not_count(
    job: EvaluationJob, partners: Any, tmp_path: Path
) -> None:
    partners.engine.version = weights_pb2.PolicyVersion(epoch=1, number=4)
    summary = await evaluate(job)
    assert summary["lost"] == 6
    assert "success" not in summary
    assert _samples(tmp_path) == {}
    partners.engine.version = weights_pb2.PolicyVersion(epoch=1, number=3)
    assert (await evaluate(job))["lost"] == 0


async def test_another_job_does_not_mix_its_results_in(job: EvaluationJob) -> None:
    await evaluate(job)
    with pytest.raises(UserError, match="another job"):
        await evaluate(job.model_copy(update={"seed": 1}))
    # Addresses may change.
    await evaluate(job.model_copy(update={"uid": "evaluation-8"}))


async def test_a_damaged_result_is_named(job: EvaluationJob, tmp_path: Path) -> None:
    await evaluate(job)
    damaged = min((tmp_path / "results/samples").iterdir())
    damaged.write_bytes(b"\xff\xff")
    with pytest.raises(CorruptError, match=f"{damaged.name} is no "):
        await evaluate(job)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"name": "x", "surprise": 1}'])
def test_a_file_that_is_no_job_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.json"
    path.write_text(text)
    assert program.main([str(path)]) == 4
    assert f"{path}  is no job" in capsys.readouterr().err


async def test_a_store_that_fails_ends_an_evaluation_with_its_own_error(
    job: EvaluationJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(SuiteResults, "write", fail)
    with pytest.raises(StoreError, match="the disk is full"):
        await evaluate(job)
