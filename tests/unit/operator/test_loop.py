"""The operator's loop: what ends with a term of leadership, and what the next one takes up."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client import REGISTRY
from typing_extensions import override

from etude.operator.builders.run import Platform
from etude.operator.clock import ManualClock
from etude.operator.controller.operator import Operator, is_unanswered, operator
from etude.operator.controller.references import Users
from etude.operator.controller.status_writer import Pace
from etude.operator.kube.interface import RefusedError
from etude.operator.kube.memory_cluster import MemoryCluster
from etude.operator.manifests import Manifest, Ref, ref
from etude.operator.remotes.clients import MemoryPeers
from etude.operator.runs.kind import RLRUN

LIMIT_S = 30.0
Acting = tuple[MemoryCluster, contextlib.AbstractAsyncContextManager[Operator]]


@dataclass(slots=True)
class HangingCluster(MemoryCluster):
    """Its API server takes writes and answers none until it is told to."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    answers: asyncio.Event = field(default_factory=asyncio.Event)

    @override
    async def apply(self, manifest: Manifest, *, manager: str) -> Manifest:
        self.reached.set()
        await self.answers.wait()
        return await MemoryCluster.apply(self, manifest, manager=manager)


@dataclass(slots=True)
class StrictCluster(MemoryCluster):
    """Its API server has an older schema, and takes no status until that is mended."""

    is_mended: bool = False

    @override
    async def replace_status(self, seen: Manifest, status: Manifest) -> Manifest:
        if not self.is_mended:
            raise RefusedError("status.novel: Unknown field")
        return await MemoryCluster.replace_status(self, seen, status)


async def test_a_status_that_is_refused_is_written_once_it_is_taken(
    platform: Platform,
    run_body: Callable[..., dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()
    cluster = StrictCluster(clock=clock)
    key = ref(cluster.put(run_body()))
    made = operator(cluster, MemoryPeers(), platform, clock, instance="test", pace=Pace(0.0))
    async with made as acting:
        acting.add_all()
        for is_mended in (False, True):
            cluster.is_mended = is_mended
            assert await acting.queue.take() == key
            await acting.one(key)
    (said,) = caplog.records
    assert "Unknown field" in said.getMessage()
    assert said.exc_info is None, "it is not a bug of ours"
    assert cluster.objects()[key]["status"]["startTime"]


async def test_a_pass_that_ends_with_the_leadership_is_made_again_in_the_next_term(
    platform: Platform, run_body: Callable[..., dict[str, Any]]
) -> None:
    clock = ManualClock()
    cluster = HangingCluster(clock=clock)
    cluster.put(run_body())
    made = operator(
        cluster, MemoryPeers(), platform, clock, instance="test", pace=Pace(figures_s=0.0)
    )
    async with asyncio.timeout(LIMIT_S), made as acting:
        term = asyncio.create_task(acting.run())
        await cluster.reached.wait()
        term.cancel()
        await asyncio.wait({term})
        cluster.answers.set()
        term = asyncio.create_task(acting.run())
        while not cluster.every("StatefulSet"):  # noqa: ASYNC110 - seen as a reader sees it
            await asyncio.sleep(0.01)
        term.cancel()
        await asyncio.wait({term})


def test_what_somebody_asked_for_and_nobody_has_answered_goes_first(
    run_body: Callable[..., dict[str, Any]],
) -> None:
    cluster, key = MemoryCluster(), Ref("RLRun", "lab", "demo")
    assert not is_unanswered(cluster, key), "it is gone"
    asked = cluster.put(run_body())["metadata"]["generation"]
    assert is_unanswered(cluster, key)
    cluster.set_status(key, {"observedGeneration": asked})
    assert not is_unanswered(cluster, key)
    cluster.put(run_body(suspend=True))
    assert is_unanswered(cluster, key)


def test_runs_are_found_by_the_pools_of_others_that_they_refer_to(
    run_body: Callable[..., dict[str, Any]],
) -> None:
    users = Users()
    run = run_body()
    users.see(ref(run), RLRUN.references(run))
    assert not users.of(Ref("EnvPool", "lab", "demo-repos")), "its own pool belongs to it"
    run["spec"]["roles"]["environments"] = [{"name": "repos", "poolRef": {"name": "shared"}}]
    users.see(ref(run), RLRUN.references(run))
    assert users.of(Ref("EnvPool", "lab", "shared")) == [Ref("RLRun", "lab", "demo")]
    assert not users.of(Ref("EnvPool", "elsewhere", "shared"))


@pytest.fixture
def acting(platform: Platform) -> Acting:
    clock = ManualClock()
    cluster = MemoryCluster(clock=clock)
    return cluster, operator(
        cluster, MemoryPeers(), platform, clock, instance="test", pace=Pace(0.0)
    )


async def test_a_run_that_is_gone_or_looks_elsewhere_is_found_by_no_pool(
    acting: Acting, run_body: Callable[..., dict[str, Any]]
) -> None:
    cluster, making = acting
    shared, other = Ref("EnvPool", "lab", "shared"), Ref("EnvPool", "lab", "other")

    def run_on(pool: str) -> Manifest:
        run = run_body()
        run["spec"]["roles"]["environments"] = [{"name": "repos", "poolRef": {"name": pool}}]
        return run

    async with making as made:
        key = ref(cluster.put(run_on("shared")))
        assert made.users.of(shared) == [key]
        cluster.put(run_on("other"))
        assert (made.users.of(shared), made.users.of(other)) == ([], [key])
        cluster.forget(key)
        assert made.users.of(other) == []


async def test_whoever_leads_no_more_shows_no_figures_and_knows_nothing(
    acting: Acting, run_body: Callable[..., dict[str, Any]]
) -> None:
    cluster, making = acting
    about = {"namespace": "lab", "run": "demo"}
    run = run_body()
    run["status"] = {"step": {"current": 7}}
    cluster.put(run)
    async with asyncio.timeout(LIMIT_S), making as made:
        term = asyncio.create_task(made.run())
        while REGISTRY.get_sample_value("etude_run_step", about) is None:  # noqa: ASYNC110 - seen as a reader sees it
            await asyncio.sleep(0.01)
        term.cancel()
        await asyncio.wait({term})
        assert REGISTRY.get_sample_value("etude_run_step", about) is None
        assert not made.reconciler.book.runs
