"""The operator's loop: what ends with a term of leadership, and what the next one takes up."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client import REGISTRY
from typing_extensions import override

from etude.operator.builders.platform import Platform
from etude.operator.clock import ManualClock
from etude.operator.controller.operator import Operator, ReferenceIndex, has_new_spec, open_operator
from etude.operator.controller.status_writer import StatusDebounce
from etude.operator.kube.interface import ApiRejectedError
from etude.operator.kube.memory_cluster import MemoryCluster
from etude.operator.manifests import Manifest, Ref, ref
from etude.operator.remotes.clients import MemoryRemoteClient
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
            raise ApiRejectedError("status.novel: Unknown field")
        return await MemoryCluster.replace_status(self, seen, status)


async def test_a_status_that_is_refused_is_written_once_it_is_taken(
    platform: Platform,
    run_body: Callable[..., dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()
    cluster = StrictCluster(clock=clock)
    key = ref(cluster.upsert(run_body()))
    made = open_operator(
        cluster,
        MemoryRemoteClient(),
        platform,
        clock,
        instance="test",
        debounce=StatusDebounce(0.0),
    )
    async with made as acting:
        acting.enqueue_all()
        for is_mended in (False, True):
            cluster.is_mended = is_mended
            assert await acting.queue.take() == key
            await acting.reconcile_key(key)
    (said,) = caplog.records
    assert "Unknown field" in said.getMessage()
    assert said.exc_info is None, "it is not a bug of ours"
    assert cluster.objects()[key]["status"]["startTime"]


async def test_a_pass_that_ends_with_the_leadership_is_made_again_in_the_next_term(
    platform: Platform, run_body: Callable[..., dict[str, Any]]
) -> None:
    clock = ManualClock()
    cluster = HangingCluster(clock=clock)
    cluster.upsert(run_body())
    made = open_operator(
        cluster,
        MemoryRemoteClient(),
        platform,
        clock,
        instance="test",
        debounce=StatusDebounce(figures_s=0.0),
    )
    async with asyncio.timeout(LIMIT_S), made as acting:
        term = asyncio.create_task(acting.run())
        await cluster.reached.wait()
        term.cancel()
        await asyncio.wait({term})
        cluster.answers.set()
        term = asyncio.create_task(acting.run())
        while not cluster.list_objects("StatefulSet"):  # noqa: ASYNC110 - seen as a reader sees it
            await asyncio.sleep(0.01)
        term.cancel()
        await asyncio.wait({term})


def test_what_somebody_asked_for_and_nobody_has_answered_goes_first(
    run_body: Callable[..., dict[str, Any]],
) -> None:
    cluster, key = MemoryCluster(), Ref("RLRun", "lab", "demo")
    assert not has_new_spec(cluster, key), "it is gone"
    asked = cluster.upsert(run_body())["metadata"]["generation"]
    assert has_new_spec(cluster, key)
    cluster.set_status(key, {"observedGeneration": asked})
    assert not has_new_spec(cluster, key)
    cluster.upsert(run_body(suspend=True))
    assert has_new_spec(cluster, key)


def test_runs_are_found_by_the_pools_of_others_that_they_refer_to(
    run_body: Callable[..., dict[str, Any]],
) -> None:
    users = ReferenceIndex()
    run = run_body()
    users.index(ref(run), RLRUN.references(run))
    assert not users.referrers(Ref("EnvPool", "lab", "demo-repos")), "its own pool belongs to it"
    run["spec"]["roles"]["environments"] = [{"name": "repos", "poolRef": {"name": "shared"}}]
    users.index(ref(run), RLRUN.references(run))
    assert users.referrers(Ref("EnvPool", "lab", "shared")) == [Ref("RLRun", "lab", "demo")]
    assert not users.referrers(Ref("EnvPool", "elsewhere", "shared"))


@pytest.fixture
def acting(platform: Platform) -> Acting:
    clock = ManualClock()
    cluster = MemoryCluster(clock=clock)
    return cluster, open_operator(
        cluster,
        MemoryRemoteClient(),
        platform,
        clock,
        instance="test",
        debounce=StatusDebounce(0.0),
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
        key = ref(cluster.upsert(run_on("shared")))
        assert made.references.referrers(shared) == [key]
        cluster.upsert(run_on("other"))
        assert (made.references.referrers(shared), made.references.referrers(other)) == ([], [key])
        cluster.purge(key)
        assert made.references.referrers(other) == []


async def test_whoever_leads_no_more_shows_no_figures_and_knows_nothing(
    acting: Acting, run_body: Callable[..., dict[str, Any]]
) -> None:
    cluster, making = acting
    about = {"namespace": "lab", "run": "demo"}
    run = run_body()
    run["status"] = {"step": {"current": 7}}
    cluster.upsert(run)
    async with asyncio.timeout(LIMIT_S), making as made:
        term = asyncio.create_task(made.run())
        while REGISTRY.get_sample_value("etude_run_step", about) is None:  # noqa: ASYNC110 - seen as a reader sees it
            await asyncio.sleep(0.01)
        term.cancel()
        await asyncio.wait({term})
        assert REGISTRY.get_sample_value("etude_run_step", about) is None
        assert not made.reconciler.reports.runs
