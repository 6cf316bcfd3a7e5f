"""Recorded rollouts, scored again by another rubric in real sandboxes."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.trainer.run_history import packed

from etude.agent.tool_calls import ToolCall
from etude.cli.environments.client import EnvironmentRequest
from etude.cli.environments.leased_tools import lease_environment
from etude.common.api.run.spec import RLRunSpec
from etude.common.errors import UserError
from etude.common.role_inputs import read_run
from etude.trainer.commands.rescore import RescoreJob, rescore
from etude.v1 import journal_pb2 as pb
from etude.v1.rewards_pb2 import RewardRecord
from etude.v1.rollout_pb2 import ENDING_STOPPED, CallRecord, Costs, Link, Rollout

OLD_REWARDS = (0.2, 0.9, 0.5)
"""Of a rollout that repairs, one that does nothing, and one that differs when repeated."""


@pytest.fixture
async def calls(stack: Any) -> list[CallRecord]:
    """Calls that repair the first task, with the results that a policy reads."""
    target = stack.problems[0].repository.target
    arguments = [
        ("list_dir", {"path": "."}),
        ("write_file", {"path": target.path, "content": target.source()}),
        ("run_terminal", {"command": "echo done > notes.txt; cat notes.txt"}),
    ]
    sent = [
        ToolCall(f"{turn}.0", name, json.dumps(given))
        for turn, (name, given) in enumerate(arguments)
    ]
    uri = f"{stack.tasks[0].as_uri()}/environment"
    wish = EnvironmentRequest(template="python", ttl_s=60, wait_s=60, uri=uri)
    async with lease_environment(stack.broker.target, wish) as environment:
        outcomes = [(await environment.run([call]))[0] for call in sent]
    assert not any(each.is_error for each in outcomes)
    return [
        CallRecord(
            turn=turn, name=call.name, arguments_json=call.arguments_json, result=outcome.content
        )
        for turn, (call, outcome) in enumerate(zip(sent, outcomes, strict=True))
    ]


def rollout(index: int, calls: Sequence[CallRecord]) -> pb.JournalRecord:
    name = f"g0-{index}"
    made = Rollout(
        rollout_id=name,
        group_id="g0",
        task_id="train/train-0",
        index=index,
        ending=ENDING_STOPPED,
        links=[Link(token_ids=[1, 2, 3])],
        costs=Costs(tool_calls=len(calls)),
        calls=calls,
    )
    reward = RewardRecord(rollout_id=name, reward=OLD_REWARDS[index])
    return pb.JournalRecord(rollout=pb.JournalRollout(rollout=made, reward=reward))


@pytest.fixture
def job(stack: Any, calls: list[CallRecord], tmp_path: Path) -> RescoreJob:
    """A run of one step, whose rollouts are to be scored by the stack's rubric."""
    other = [CallRecord.FromString(each.SerializeToString()) for each in calls]
    other[-1].result = "another\n"
    records = [
        pb.JournalRecord(open=pb.JournalOpen(epoch=1)),
        pb.JournalRecord(admit=pb.JournalAdmit(group_id="g0", phase="rl", task_id="train/train-0")),
        rollout(0, calls),
        rollout(1, ()),
        rollout(2, other),
        pb.JournalRecord(batch=pb.JournalBatch(phase="rl", step=1, group_ids=["g0"])),
        pb.JournalRecord(step=pb.JournalStep(phase="rl", step=1)),
    ]
    store = tmp_path / "store"
    for key, data in ({"owner": b"u"} | packed(records)).items():
        (store / key).parent.mkdir(parents=True, exist_ok=True)
        (store / key).write_bytes(data)
    run = read_run(Path(stack.rewards.env["ETUDE_RUN_FILE"]))
    storage = run.spec.storage.model_copy(update={"uri": store.as_uri()})
    return RescoreJob(
        run=run.model_copy(update={"spec": run.spec.model_copy(update={"storage": storage})}),
        brokers={"repos": stack.broker.target},
        rewards=stack.rewards.target,
        results=tmp_path / "rescored",
    )


def content(folder: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def rows(job: RescoreJob) -> list[dict[str, Any]]:
    lines = (job.results / "rollouts.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line]


async def test_each_rollout_has_its_old_and_its_new_reward_and_the_run_is_not_changed(
    job: RescoreJob, tmp_path: Path
) -> None:
    before = content(tmp_path / "store")
    summary = await rescore(job)
    found = {row["rollout_id"]: row for row in rows(job)}
    assert [found[f"g0-{index}"]["old_reward"] for index in range(3)] == list(OLD_REWARDS)
    assert (found["g0-0"]["new_success"], found["g0-1"]["new_reward"]) == (1.0, 0.0)
    assert "had another result, from character" in found["g0-2"]["left_out"]
    assert (summary["scored"], summary["left_out"], summary["lost"]) == (2, 1, 0)
    assert (summary["rank_correlation"], summary["sibling_pairs_reversed"]) == (-1, 1)
    assert json.loads((job.results / "summary.json").read_text()) == summary
    assert content(tmp_path / "store") == before


async def test_scored_groups_are_not_scored_again_and_lost_ones_are(job: RescoreJob) -> None:
    first = await rescore(job)
    before = content(job.results)
    assert await rescore(job) == first
    assert content(job.results) == before
    # As a platform that lost a rollout, and a kill within a line, leave it.
    path, row = job.results / "rollouts.jsonl", rows(job)[0]
    del row["new_reward"]
    with path.open("a") as file:
        file.write(json.dumps(row | {"fault": "EnvironmentLost"}) + '\n{"rollout_id": "g0')
    assert await rescore(job) == first


async def test_results_of_another_rubric_are_not_mixed(job: RescoreJob) -> None:
    job.results.mkdir()
    (job.results / "job.json").write_bytes(b"{}")
    with pytest.raises(UserError, match="results of another run or rubric"):
        await rescore(job)


async def test_steps_without_rollouts_are_named(job: RescoreJob) -> None:
    with pytest.raises(UserError, match="no trained rollouts from step 2"):
        await rescore(job.model_copy(update={"first_step": 2}))


async def test_tasks_that_the_spec_lacks_are_named(job: RescoreJob) -> None:
    spec: RLRunSpec = job.run.spec
    phase = spec.phases[0]
    renamed = [each.model_copy(update={"name": "other"}) for each in phase.tasks or ()]
    phases = (phase.model_copy(update={"tasks": tuple(renamed)}),)
    run = job.run.model_copy(update={"spec": spec.model_copy(update={"phases": phases})})
    with pytest.raises(UserError, match="train/train-0, which is in no task set"):
        await rescore(job.model_copy(update={"run": run}))
