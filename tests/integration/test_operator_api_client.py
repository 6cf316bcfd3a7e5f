"""How the real cluster's client reads, against an API server that answers as a test wants it to."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.kube.api_servers import (
    FORBIDDEN,
    KEY,
    LIMIT_S,
    PODS,
    Serve,
    job_set,
    listing,
    pod,
    serving,
)

from etude.operator.builders.certificates import CertificateMode, CertManagerIssuer, PlatformTls
from etude.operator.builders.platform import Platform
from etude.operator.integrations.apis import enabled_kinds
from etude.operator.kube import discovery
from etude.operator.kube import rest as requests
from etude.operator.kube import watches as watching
from etude.operator.kube.discovery import Discovery
from etude.operator.kube.interface import ClusterError
from etude.operator.kube.leases import KubernetesLeaseStore, LeaderLease
from etude.operator.kube.rest import path_of
from etude.operator.kube.watches import CHILDREN, Watches
from etude.operator.manifests import OWN_KINDS, Ref


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    return lambda: serving(tmp_path)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the cache is polled as a reader would
        await asyncio.sleep(0.01)


async def test_p15_the_first_answer_says_what_time_it_is(serve: Serve) -> None:
    async with serve() as (server, cluster):
        server.answers[f"GET {PODS}"] = [listing(1)]
        server.headers = {"Date": "Sat, 01 Jan 2000 12:00:00 GMT"}
        await cluster.rest.request("GET", PODS)
        assert 0 <= cluster.rest.clock.wall_s() - 946_728_000 < LIMIT_S


async def test_a_watch_goes_on_from_the_list_and_lists_again_when_it_is_too_late(
    serve: Serve,
) -> None:
    async with serve() as (server, cluster):
        for kind in CHILDREN:
            server.answers[f"GET {path_of(kind)}"] = [listing(1)]
        server.answers[f"GET {PODS}"] = [listing(5, pod(5)), listing(9, pod(9, phase="Failed"))]
        gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410}}
        bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "7"}}}
        server.watches = [[{"type": "MODIFIED", "object": pod(6)}, bookmark], [gone]]
        watching = asyncio.create_task(Watches(cluster.rest, cluster.cache).keep_watching())
        await until(lambda: (cluster.get(KEY) or {}).get("status") == {"phase": "Failed"})
        watching.cancel()
        found = cluster.get(KEY)
    assert found is not None
    assert "managedFields" not in found["metadata"]
    watches = [
        path for _, path, _ in server.requests if path.startswith(f"{PODS}?") and "watch" in path
    ]
    assert ["resourceVersion=5" in watches[0], "resourceVersion=7" in watches[1]] == [True, True]


async def test_a_list_is_read_page_by_page_and_anew_when_a_page_is_too_late(serve: Serve) -> None:
    async with serve() as (server, cluster):
        first, second = pod(5), pod(6, uid="u2")
        second["metadata"]["name"] = "q"
        more = listing(7, first)
        more[1]["metadata"]["continue"] = "token"
        gone = 410, {"message": "The provided continue parameter is too old"}
        server.answers[f"GET {PODS}"] = [more, gone, more, listing(7, second)]
        for kind in (*OWN_KINDS, *CHILDREN):
            server.answers.setdefault(f"GET {path_of(kind)}", [listing(1)])
        await Watches(cluster.rest, cluster.cache).sync()
        assert {m["metadata"]["name"] for m in cluster.list_objects("Pod")} == {"p", "q"}
    asked = [path for _, path, _ in server.requests if path.startswith(PODS)]
    assert ["continue=token" in path for path in asked] == [False, True, False, True]


async def test_a_request_that_is_cancelled_as_it_times_out_ends_its_task(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that took its cancellation for a time-out would outlive its term of leadership."""
    limit_s = 0.02
    monkeypatch.setattr(requests, "WRITE_TIMEOUT_S", limit_s)
    async with serve() as (server, cluster):
        server.answers["PATCH /busy"] = [(200, {})]
        server.pause_s = 1.0

        async def work() -> None:
            while True:
                with contextlib.suppress(ClusterError):
                    await cluster.rest.request("PATCH", "/busy", body={})

        for attempt in range(20):
            tasks = [asyncio.create_task(work()) for _ in range(8)]
            await asyncio.sleep(limit_s + (attempt - 10) / 2_500)
            for task in tasks:
                task.cancel()
            _, pending = await asyncio.wait(tasks, timeout=10 * limit_s + 1)
            assert not pending


async def test_a_watch_that_is_refused_is_tried_again_ever_later(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve() as (server, cluster):
        for kind in CHILDREN:
            server.answers[f"GET {path_of(kind)}"] = [listing(1)]
        server.watch_status = 403
        watching = asyncio.create_task(Watches(cluster.rest, cluster.cache).keep_watching())
        await until(
            lambda: "watch of Pod: watch /api/v1/pods: 403; retries in 2.0 s" in caplog.messages
        )
        watching.cancel()
    asked = [path for _, path, _ in server.requests if path.startswith(PODS)]
    assert ["watch" in path for path in asked] == [False, True, True, True]


@pytest.mark.parametrize(("exceptions", "is_used"), [("", True), ("127.0.0.1", False)])
async def test_a_proxy_of_the_environment_is_asked_unless_it_says_otherwise(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, exceptions: str, *, is_used: bool
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", exceptions)
    async with serve() as (server, cluster):
        server.answers["GET /x"] = [(200, {})]
        if is_used:
            with pytest.raises(ClusterError, match="ProxyConnection"):
                await cluster.rest.request("GET", "/x")
        else:
            assert (await cluster.rest.request("GET", "/x")).status == 200


async def test_a_lease_that_says_nothing_yet_is_anybodys(serve: Serve) -> None:
    async with serve() as (server, cluster):
        empty = {"kind": "Lease", "metadata": {"name": "l", "resourceVersion": "9"}}
        server.answers[f"GET {path_of('Lease', 'lab', 'l')}"] = [(200, empty)]
        found = await KubernetesLeaseStore(cluster.rest, "lab", "l").read()
    assert found == LeaderLease(holder="", duration_s=0, version="9")


async def test_an_api_server_that_asks_for_a_pause_gets_it(serve: Serve) -> None:
    async with serve() as (server, cluster):
        server.headers = {"Retry-After": "1"}
        server.answers["PATCH /api/v1/namespaces/lab/pods/p/status"] = [(429, {"message": "later"})]
        with pytest.raises(ClusterError):
            await cluster.replace_status(pod(5), {})
        assert cluster.rest.budget.tokens.tokens == pytest.approx(-cluster.rest.budget.rate_per_s)


async def test_one_round_of_checks_finds_what_watches_missed_in_every_namespace(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "CHECK_GRACE_S", 0.0)
    async with serve() as (server, cluster):
        watches = Watches(cluster.rest, cluster.cache, ("away", "lab", "other"), ("Pod",))
        for namespace in ("lab", "other"):
            missed = pod(5, uid=namespace)
            missed["metadata"]["namespace"] = namespace
            server.answers[f"GET {path_of('Pod', namespace)}"] = [listing(6, missed)]
        server.answers[f"GET {path_of('Pod', 'away')}"] = [(500, {})]
        await watches._check()
        assert [m["metadata"]["namespace"] for m in cluster.list_objects("Pod")] == ["lab", "other"]


async def test_pods_are_reached_by_their_address_once_it_is_known(serve: Serve) -> None:
    async with serve() as (_, cluster):
        assert cluster.address("lab", "p.svc:7000") == "p.svc.lab.svc:7000"
        cluster.cache.update({**pod(5), "status": {"podIP": "10.0.0.7"}})
        assert cluster.address("lab", "p.svc:7000") == "svc.lab.svc@10.0.0.7:7000"


JOBSETS = path_of("JobSet")
SERVED = (200, {"resources": [{"name": "jobsets", "kind": "JobSet"}, {"name": "jobsets/status"}]})


def groups(*versions: str) -> tuple[int, Any]:
    return 200, {"groups": [{"versions": [{"groupVersion": each}]} for each in versions]}


async def test_an_operator_starts_without_the_apis_of_others(serve: Serve) -> None:
    tls = PlatformTls(mode=CertificateMode.CERT_MANAGER, issuer=CertManagerIssuer(name="ca"))
    async with serve() as (server, cluster):
        cluster.discovery = Discovery(
            enabled_kinds(Platform(tls=tls, integrations=frozenset({"jobset"})))
        )
        for kind in (*OWN_KINDS, *CHILDREN):
            server.answers[f"GET {path_of(kind)}"] = [listing(1)]
        server.answers["GET /apis"] = [groups()]
        watches = Watches(cluster.rest, cluster.cache, discovery=cluster.discovery)
        await asyncio.wait_for(watches.sync(), LIMIT_S)
        assert cluster.usable_kinds({"Certificate", "JobSet"}) == frozenset()
        server.answers["GET /apis"] = [groups("cert-manager.io/v1")]
        resources = {"resources": [{"name": "certificates", "kind": "Certificate"}]}
        server.answers["GET /apis/cert-manager.io/v1"] = [(200, resources)]
        server.answers[f"GET {path_of('Certificate')}"] = [listing(1)]
        await asyncio.wait_for(watches.sync(), LIMIT_S)
        assert cluster.usable_kinds({"Certificate", "JobSet"}) == {"Certificate"}


async def test_nobody_looks_for_what_the_operator_was_not_told_to_use() -> None:
    discovery = Discovery(("JobSet",))
    discovery.set_usable_kinds({"JobSet"})
    assert discovery.usable_kinds({"JobSet", "Certificate"}) == {"JobSet"}
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(discovery._requested.wait(), 0.01)


async def test_an_api_is_used_from_when_it_is_installed_until_it_is_removed(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "MIN_INTERVAL_S", 0.01)
    key, wanted = Ref("JobSet", "lab", "demo"), {"JobSet"}
    async with serve() as (server, cluster):
        cluster.discovery = Discovery(("JobSet", "RayCluster"))
        for kind in (*OWN_KINDS, *CHILDREN):
            server.answers[f"GET {path_of(kind)}"] = [listing(1)]
        server.answers["GET /apis/jobset.x-k8s.io/v1alpha2"] = [SERVED]
        api = server.answers["GET /apis"]
        api.append(groups())
        watches = Watches(cluster.rest, cluster.cache, discovery=cluster.discovery)
        await watches.sync()
        assert cluster.usable_kinds(wanted) == frozenset()
        watching = asyncio.create_task(watches.keep_watching())
        server.answers[f"GET {JOBSETS}"] = [FORBIDDEN, listing(5, job_set())]
        api[:] = [groups("jobset.x-k8s.io/v1alpha2")]
        await until(lambda: cluster.usable_kinds(wanted) == wanted)
        assert cluster.get(key) is not None, "known before it is used"
        await until(
            lambda: any("watch=1" in path and JOBSETS in path for _, path, _ in server.requests)
        )
        api[:] = [(503, {}), groups()]
        await until(lambda: not cluster.usable_kinds({*wanted, "RayCluster"}))
        await until(lambda: cluster.get(key) is None)
        api[:] = [groups("jobset.x-k8s.io/v1alpha2")]  # it was only the API server that began anew
        await until(lambda: not cluster.usable_kinds({*wanted, "RayCluster"}) < wanted)
        assert cluster.get(key) is not None
        watching.cancel()
