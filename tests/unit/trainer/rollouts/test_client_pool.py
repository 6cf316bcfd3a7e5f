"""What runs beside rollouts does not end unnoticed."""

from pathlib import Path

import pytest

from etude.common.api.storage import Storage
from etude.trainer.rollouts.client_pool import ClientPool
from etude.trainer.rollouts.leases import Leases
from etude.trainer.rollouts.protocol import WorkerConfig


def peers() -> ClientPool:
    return ClientPool(
        WorkerConfig(
            run="run",
            model_folder=Path("model"),
            brokers={"repos": "127.0.0.1:1"},
            templates={"repos": "python"},
            rewards_target="127.0.0.1:1",
            score_timeout_s=1,
            storage=Storage(uri="file:///run"),
            outage_s=1,
        )
    )


async def test_a_keeper_of_leases_that_ends_fails_whoever_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def broken(_: Leases) -> None:
        raise RuntimeError("nobody renews")

    monkeypatch.setattr(Leases, "keep_alive", broken)
    made = peers()
    made.leases("repos")
    [keeper] = made._renewals.values()
    with pytest.raises(RuntimeError):
        await keeper
    with pytest.raises(RuntimeError, match="nobody renews"):
        made.leases("repos")
    await made.close()
