"""Tokens of a run's rollouts are in its store before their worker hands the group over."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from etude.common.api.run.rollout_policy import RolloutPolicy
from etude.common.blobs import open_store
from etude.trainer.contents.objects import restore_rollouts
from etude.trainer.rollouts.protocol import GroupRequest
from etude.trainer.rollouts.worker import RolloutWorker
from etude.trainer.routing.table import EngineState, RoutingTable
from etude.v1.journal_pb2 import JournalRollout


async def test_tokens_are_in_the_store_and_records_have_their_counts(
    worker: RolloutWorker, partners: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "tasks" / "fix-add"
    folder.mkdir(parents=True)
    (folder / "instruction.md").write_text("Fix add.\n")
    (folder / "task.toml").write_text("")
    request = GroupRequest(
        group_id="rl-7",
        task_id="train/fix-add",
        task_uri=folder.as_uri(),
        environment="repos",
        indices=(0, 1, 2),
        seed=11,
        temperature=1.0,
        routing=RoutingTable(revision=1, engines=((partners.target, EngineState.LIVE),)),
        limits=RolloutPolicy(toolset="Compact", max_tokens=600, timeout_seconds=20, retries=1),
    )
    storing = RolloutWorker(replace(worker.config, stores_contents=True))
    try:
        result = await storing.run_group(request)
    finally:
        await storing.close()
    records = [JournalRollout.FromString(data) for data in result.records]
    assert [record.reward.reward for record in records] == [1.0] * 3
    assert not any(record.rollout.links for record in records)
    whole = list(restore_rollouts(open_store((tmp_path / "run").as_uri()), records))
    for record, handed in zip(whole, records, strict=True):
        sampled = sum(record.rollout.links[0].loss_mask)
        assert sampled == record.rollout.costs.completion_tokens
        assert [link.sampled for link in handed.content.links] == [sampled]
