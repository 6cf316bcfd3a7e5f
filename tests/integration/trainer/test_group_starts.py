"""A group whose task has a set-up: done once, forked, graded on, dropped; or masked, never zero."""

from pathlib import Path
from typing import Any

import pytest

from etude.common.api.run.rollout_policy import RolloutPolicy
from etude.trainer.rollouts.group_start import MAX_SETUPS
from etude.trainer.rollouts.protocol import GroupRequest, GroupResult
from etude.trainer.rollouts.worker import RolloutWorker
from etude.trainer.routing.table import EngineState, RoutingTable
from etude.v1 import environments_pb2, rollout_pb2
from etude.v1.journal_pb2 import JournalRollout

COMMANDS = ["make deps", "make build"]


@pytest.fixture
def task_uri(tmp_path: Path) -> str:
    folder = tmp_path / "tasks" / "fix-add"
    folder.mkdir(parents=True)
    (folder / "instruction.md").write_text("Fix add.\n")
    settings = 'etude_setup = ["make deps", "make build"]\netude_setup_timeout_sec = 90\n'
    (folder / "task.toml").write_text(f"[metadata]\n{settings}")
    return folder.as_uri()


def order(task_uri: str, partners: Any, count: int = 3, group: str = "rl-7") -> GroupRequest:
    return GroupRequest(
        group_id=group,
        task_id="train/fix-add",
        task_uri=task_uri,
        environment="repos",
        indices=tuple(range(count)),
        seed=11,
        temperature=1.0,
        routing=RoutingTable(revision=1, engines=((partners.target, EngineState.LIVE),)),
        limits=RolloutPolicy(toolset="Compact", max_tokens=600, timeout_seconds=20, retries=1),
    )


def rollouts(result: GroupResult) -> list[JournalRollout]:
    return [JournalRollout.FromString(data) for data in result.records]


def forks(partners: Any) -> list[environments_pb2.LaunchBatchRequest]:
    return [launch for launch in partners.broker.launches if launch.snapshot_id]


async def test_a_group_is_set_up_once_and_its_rollouts_are_forks(
    worker: RolloutWorker, partners: Any, task_uri: str
) -> None:
    result = await worker.run_group(order(task_uri, partners))

    assert [r.reward.reward for r in rollouts(result)] == [1.0] * 3
    [done] = partners.states.set_up
    assert (list(done.commands), done.timeout_seconds) == (COMMANDS, 90)
    [saved] = partners.states.saved
    assert saved.lease_id == done.lease_id
    assert not saved.with_memory
    assert 20 < saved.ttl_seconds < 86_400
    first, siblings = partners.broker.launches
    assert (first.count, siblings.count) == (1, 3)
    assert first.group_id == siblings.group_id == "rl-7"
    assert siblings.snapshot_id == saved.snapshot_id
    starts = result.starts
    assert (starts.setups, starts.forked, starts.separate) == (1, 3, 0)


async def test_hidden_tests_get_the_snapshot_which_is_dropped_after_them(
    worker: RolloutWorker, partners: Any, task_uri: str
) -> None:
    result = await worker.run_group(order(task_uri, partners))

    [saved] = partners.states.saved
    [scored] = partners.rewards.requests
    assert {each.snapshot_id for each in scored.rollouts} == {saved.snapshot_id}
    assert partners.states.dropped == [saved.snapshot_id]
    assert not any(record.rollout.snapshot_id for record in rollouts(result))


async def test_the_broker_hears_of_a_group_before_it_is_asked_for_environments(
    worker: RolloutWorker, partners: Any, task_uri: str
) -> None:
    await worker.run_group(order(task_uri, partners))

    [told] = partners.broker.announced
    assert (told.group_id, told.count, told.template) == ("rl-7", 3, "python")


async def test_a_set_up_that_fails_masks_the_group_and_says_which_command(
    worker: RolloutWorker, partners: Any, task_uri: str
) -> None:
    partners.states.failing_command = 1

    result = await worker.run_group(order(task_uri, partners))

    faults = [record.rollout for record in rollouts(result)]
    assert {each.ending for each in faults} == {rollout_pb2.ENDING_PLATFORM_FAULT}
    what = "metadata.etude_setup[1] of the task ended with exit code 3: 'no such package'"
    assert all(what in each.fault for each in faults)
    assert len(partners.states.set_up) == result.starts.setups_failed == 1
    assert not partners.rewards.requests
    assert not partners.states.saved


async def test_a_host_that_dies_in_a_set_up_leads_to_another_set_up(
    worker: RolloutWorker, partners: Any, task_uri: str
) -> None:
    partners.states.lost_setups = 1

    result = await worker.run_group(order(task_uri, partners))

    assert [r.reward.reward for r in rollouts(result)] == [1.0] * 3
    one, other = partners.states.set_up
    assert one.lease_id != other.lease_id
    assert (result.starts.setups_lost, result.starts.setups, result.starts.forked) == (1, 1, 3)


async def test_a_host_that_dies_before_the_forks_leads_to_another_set_up(
    worker: RolloutWorker, partners: Any, task_uri: str
) -> None:
    partners.broker.lost_snapshots = 1

    result = await worker.run_group(order(task_uri, partners))

    assert [r.reward.reward for r in rollouts(result)] == [1.0] * 3
    assert [each.snapshot_id for each in forks(partners)] == [
        each.snapshot_id for each in partners.states.saved
    ]
    assert (result.starts.setups, result.starts.forked, result.retried) == (2, 3, 0)
    assert sorted(partners.states.dropped) == sorted(
        each.snapshot_id for each in partners.states.saved
    )


async def test_siblings_are_set_up_one_by_one_once_set_ups_are_lost_too_often(
    worker: RolloutWorker, partners: Any, task_uri: str
) -> None:
    partners.states.lost_setups = MAX_SETUPS

    result = await worker.run_group(order(task_uri, partners))

    assert [r.reward.reward for r in rollouts(result)] == [1.0] * 3
    assert not forks(partners)
    assert len(partners.states.set_up) == MAX_SETUPS + 3
    assert (result.starts.setups_lost, result.starts.separate) == (MAX_SETUPS, 3)


async def test_siblings_are_set_up_one_by_one_where_environments_cannot_be_saved(
    worker: RolloutWorker, partners: Any, task_uri: str
) -> None:
    partners.broker.can_save = False

    result = await worker.run_group(order(task_uri, partners))

    assert [r.reward.reward for r in rollouts(result)] == [1.0] * 3
    assert len({each.lease_id for each in partners.states.set_up}) == 3
    assert not partners.states.saved
    [scored] = partners.rewards.requests
    assert not any(each.snapshot_id for each in scored.rollouts)


async def test_a_replacement_is_set_up_before_calls_are_replayed_in_it(
    worker: RolloutWorker, partners: Any, task_uri: str
) -> None:
    partners.node.losses = 1

    result = await worker.run_group(order(task_uri, partners))

    assert (result.lost, result.recovered, result.retried) == (1, 1, 0)
    assert len(partners.states.set_up) == 2
    assert [r.reward.reward for r in rollouts(result)] == [1.0] * 3


async def test_a_rollout_without_siblings_is_set_up_in_its_own_environment(
    worker: RolloutWorker, partners: Any, task_uri: str
) -> None:
    result = await worker.run_group(order(task_uri, partners, count=1))

    [launch], [done] = partners.broker.launches, partners.states.set_up
    assert done.lease_id == partners.broker.granted[launch.idempotency_key][0].lease_id
    assert (result.starts.separate, partners.broker.announced) == (1, [])
