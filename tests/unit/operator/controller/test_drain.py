"""Nodes go while their brokers keep them empty, and not a moment later."""

import asyncio
from dataclasses import dataclass, field

import pytest
from typing_extensions import override

from etude.operator.actions import DrainHosts
from etude.operator.controller.executor import DELETE_MARGIN_S, drain_hosts
from etude.operator.kube.memory_cluster import MemoryCluster
from etude.operator.kube.rest import WRITE_TIMEOUT_S
from etude.operator.manifests import Manifest, Ref
from etude.operator.remotes import clients as brokers
from etude.operator.remotes.clients import MemoryRemoteClient

NODES = {Ref("Pod", "lab", name): f"uid-{name}" for name in ("a", "b")}
POOL: Manifest = {"metadata": {"name": "repos", "namespace": "lab"}}
LIMIT_S = 30.0


@dataclass(slots=True)
class Deleting(MemoryCluster):
    """Notes what is deleted, once the API server takes something."""

    deleted: list[str] = field(default_factory=list)
    answers: asyncio.Event = field(default_factory=asyncio.Event)

    @override
    async def delete(self, ref: Ref, *, uid: str, grace_s: int | None = None) -> None:
        await self.answers.wait()
        self.deleted.append(ref.name)


@pytest.fixture
def cluster() -> Deleting:
    return Deleting()


async def test_what_every_broker_calls_empty_goes(cluster: Deleting) -> None:
    peers = MemoryRemoteClient(hosts_in_use={"b"})
    cluster.answers.set()
    await drain_hosts(cluster, peers, POOL, DrainHosts(brokers=("one:1", "two:1"), hosts=NODES))
    assert cluster.deleted == ["a"]
    assert peers.drained.keys() == {"one:1", "two:1"}


async def test_nothing_goes_while_a_broker_does_not_answer(cluster: Deleting) -> None:
    cluster.answers.set()
    peers = MemoryRemoteClient(unresponsive={"two:1"})
    await drain_hosts(cluster, peers, POOL, DrainHosts(brokers=("one:1", "two:1"), hosts=NODES))
    assert cluster.deleted == []


async def test_nothing_goes_after_the_promise_of_the_brokers_has_ended(
    cluster: Deleting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brokers, "HOLD_S", DELETE_MARGIN_S + 0.05)
    async with asyncio.timeout(LIMIT_S):
        # Its turn at the API server does not come.
        await drain_hosts(
            cluster, MemoryRemoteClient(), POOL, DrainHosts(brokers=("one:1",), hosts=NODES)
        )
    cluster.answers.set()
    await asyncio.sleep(0)
    assert cluster.deleted == []


def test_a_deletion_that_was_sent_in_time_takes_effect_in_time() -> None:
    assert DELETE_MARGIN_S >= WRITE_TIMEOUT_S
