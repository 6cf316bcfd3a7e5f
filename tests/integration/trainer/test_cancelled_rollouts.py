"""Groups that are cancelled before their rollouts have environments hold nothing afterwards."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from etude.common.api.run.rollout_policy import RolloutPolicy
from etude.trainer.rollouts.protocol import GroupRequest
from etude.trainer.rollouts.worker import RolloutWorker
from etude.trainer.routing.table import EngineState, RoutingTable

SLOTS = 2


@pytest.fixture
def order(partners: Any, tmp_path: Path) -> GroupRequest:
    folder = tmp_path / "tasks" / "fix-add"
    folder.mkdir(parents=True)
    (folder / "instruction.md").write_text("Fix add.\n")
    (folder / "task.toml").write_text("")
    return GroupRequest(
        group_id="rl-000007",
        task_id="train/fix-add",
        task_uri=folder.as_uri(),
        environment="repos",
        indices=(0, 1),
        seed=11,
        temperature=1.0,
        routing=RoutingTable(revision=1, engines=((partners.target, EngineState.LIVE),)),
        limits=RolloutPolicy(toolset="Compact", max_tokens=900, timeout_seconds=60, retries=1),
        share=SLOTS,
    )


async def wait_until(is_true: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not is_true():  # noqa: ASYNC110 - no event says it
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_dropped", [False, True])
async def test_a_group_cancelled_while_it_waits_for_environments_frees_its_slots(
    partners: Any, worker: RolloutWorker, order: GroupRequest, *, is_dropped: bool
) -> None:
    partners.broker.is_full = True
    waiting = asyncio.create_task(worker.run_group(order))
    await wait_until(lambda: partners.broker.launches)
    await worker.cancel_group(order.group_id, is_dropped=is_dropped)
    assert not (await waiting).records
    partners.broker.is_full = False

    async with asyncio.timeout(30):
        result = await worker.run_group(replace(order, group_id="rl-000008"))

    assert len(result.records) == SLOTS
