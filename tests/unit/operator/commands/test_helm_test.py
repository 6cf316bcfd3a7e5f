"""What `helm test` finds wrong with an installation."""

import asyncio

import pytest

from etude.common.probes import Probes
from etude.operator.clock import SystemClock
from etude.operator.commands import helm_test
from etude.operator.controller.leader_election import LeaderElector
from etude.operator.kube.leases import MemoryLeaseStore

NONE_S = 0.05
"""Patience that is over after one look."""


@pytest.fixture(autouse=True)
def _short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helm_test, "RETRY_S", 0.01)


async def test_one_who_renews_the_lease_leads() -> None:
    leases = MemoryLeaseStore()
    leader = LeaderElector(leases, SystemClock(), "etude-0")

    async def renew() -> None:
        while True:
            await leader.campaign()
            await asyncio.sleep(0)

    renewing = asyncio.create_task(renew())
    assert await helm_test.leader_problem(leases, "etude", patience_s=30) is None
    renewing.cancel()


async def test_one_who_holds_the_lease_and_is_gone_does_not_lead() -> None:
    leases = MemoryLeaseStore()
    leader = LeaderElector(leases, SystemClock(), "etude-0")
    await leader.campaign()
    problem = await helm_test.leader_problem(leases, "etude", patience_s=NONE_S)
    assert problem is not None
    assert (problem.where, problem.what) == ("lease etude", "is not renewed by etude-0")
    await leader.release()
    problem = await helm_test.leader_problem(leases, "etude", patience_s=NONE_S)
    assert problem is not None
    assert problem.what == "has no holder"


async def test_without_a_lease_or_an_api_server_nobody_leads() -> None:
    problem = await helm_test.leader_problem(MemoryLeaseStore(), "etude", patience_s=NONE_S)
    assert problem is not None
    assert problem.what == "does not exist"
    problem = await helm_test.leader_problem(
        MemoryLeaseStore(is_down=True), "etude", patience_s=NONE_S
    )
    assert problem is not None
    assert "the API server does not answer" in problem.what


async def test_a_replica_answers_once_it_is_ready() -> None:
    probes = Probes(0, "127.0.0.1")
    await probes.start()
    try:
        where = ("127.0.0.1", probes.port)
        problem = await helm_test.probe_problem(where, patience_s=NONE_S)
        assert problem is not None
        assert problem.what == "answers 503"
        assert problem.where.endswith("/readyz")
        probes.ready = True
        assert await helm_test.probe_problem(where, patience_s=NONE_S) is None
    finally:
        await probes.stop()
    gone = await helm_test.probe_problem(where, patience_s=NONE_S)
    assert gone is not None
    assert "does not answer" in gone.what
