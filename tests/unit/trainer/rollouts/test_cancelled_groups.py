"""Workers learn of a group that is cancelled, and whether its rollouts have a successor."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from etude.common.api.run.rollout_policy import RolloutPolicy
from etude.trainer import ray_backend
from etude.trainer.controller.phases.running_groups import RunningGroups
from etude.trainer.rollouts.protocol import GroupRequest

ORDER = GroupRequest(
    group_id="g",
    task_id="train/t",
    task_uri="file:///tasks/t",
    environment="repos",
    indices=(0, 1),
    seed=0,
    temperature=1.0,
    limits=RolloutPolicy(),
)


@dataclass(slots=True)
class Calls:
    """Calls to an actor whose groups run for ever."""

    made: list[tuple[Any, ...]] = field(default_factory=list)
    is_running: asyncio.Event = field(default_factory=asyncio.Event)

    def actor(self) -> Any:
        names = ("drop_rollouts", "cancel_group")
        calls = {name: SimpleNamespace(remote=self._recorder(name)) for name in names}
        return SimpleNamespace(run_group=SimpleNamespace(remote=self._run), **calls)

    def _recorder(self, name: str) -> Any:
        return lambda *arguments, **named: self.made.append((name, *arguments, *named.values()))

    async def _run(self, _: object) -> None:
        self.is_running.set()
        await asyncio.Event().wait()


@pytest.mark.parametrize("is_dropped", [False, True])
async def test_only_groups_that_were_dropped_are_cancelled_for_good(*, is_dropped: bool) -> None:
    calls, running = Calls(), RunningGroups()
    workers = ray_backend.RayRollouts([ray_backend._Worker(calls.actor())])
    task = asyncio.create_task(workers.run(ORDER))
    running.add(ORDER, task)  # type: ignore[arg-type] # its result is not looked at
    await calls.is_running.wait()
    if is_dropped:
        running.drop("g", workers)
    else:
        running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    drop = [("drop_rollouts", ["g-0", "g-1"])] if is_dropped else []
    assert calls.made == [*drop, ("cancel_group", "g", is_dropped)]
