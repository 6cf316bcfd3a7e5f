"""A rollout worker that died is waited for, and not for ever."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from etude.common.api.run.rollout_policy import RolloutPolicy
from etude.trainer import ray_backend
from etude.trainer.rollouts.protocol import GroupRequest, WorkerLostError

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


def dying(answers: int) -> Any:
    """An actor whose pings fail so often before one is answered."""
    left = iter(range(answers))

    async def die(_: object) -> None:
        raise ActorDiedError

    async def ping() -> None:
        if next(left, None) is not None:
            raise ActorDiedError

    async def die_writing(*_: object) -> None:
        raise ActorDiedError

    return SimpleNamespace(
        run_group=SimpleNamespace(remote=die),
        write_rollouts=SimpleNamespace(remote=die_writing),
        ping=SimpleNamespace(remote=ping),
    )


@pytest.mark.parametrize(
    ("failures", "words"), [(2, "was restarted"), (10_000, "did not come back within")]
)
async def test_a_worker_that_died_is_waited_for_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch, failures: int, words: str
) -> None:
    monkeypatch.setattr(ray_backend, "PING_EVERY_S", 0.001)
    monkeypatch.setattr(ray_backend, "REVIVAL_S", 0.5)
    worker = ray_backend._Worker(dying(failures))
    with pytest.raises(WorkerLostError, match=words):
        await ray_backend.RayRollouts([worker]).run(ORDER)
    assert worker.load == 0


async def test_a_worker_that_died_while_it_wrote_is_waited_for_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_backend, "PING_EVERY_S", 0.001)
    pings = dying(2)
    with pytest.raises(WorkerLostError, match="that wrote them died"):
        await ray_backend.RayRollouts([ray_backend._Worker(pings)]).write_rollouts(1, "train", [])
    await pings.ping.remote()  # it answers now
