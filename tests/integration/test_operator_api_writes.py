"""How the real cluster's client writes, against an API server that answers as it is told to."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
from tests.support.kube.api_servers import (
    FORBIDDEN,
    KEY,
    LAB_PODS,
    POD,
    PODS,
    Serve,
    job_set,
    listing,
    pod,
    serving,
)

from etude.operator.kube.client import GateClosedError
from etude.operator.kube.interface import (
    ApiRejectedError,
    ClusterError,
    ConflictError,
    NamespaceClosingError,
)
from etude.operator.kube.leases import KubernetesLeaseStore
from etude.operator.kube.rest import path_of
from etude.operator.kube.watches import CHILDREN, Watches
from etude.operator.manifests import OWN_KINDS, Ref


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    return lambda: serving(tmp_path)


async def test_what_was_written_is_read_back_at_once_and_never_overtaken(serve: Serve) -> None:
    async with serve() as (server, cluster):
        server.answers[f"POST {LAB_PODS}"] = [(201, pod(20))]
        await cluster.apply(pod(0), manager="test")
        cluster.cache.update(pod(15, phase="Pending"))
        found = cluster.get(KEY)
    assert found is not None
    assert found["status"] == {"phase": "Running"}


async def test_no_write_leaves_through_a_gate_that_closed_while_it_waited(serve: Serve) -> None:
    new = pod(0, uid="u2")
    new["metadata"]["name"] = "new"
    async with serve() as (server, cluster):
        cluster.cache.update(pod(5))
        cluster.rest.budget.pause(1.0)  # as an API server asks that has too much to do
        waiting = asyncio.gather(
            cluster.apply(new, manager="test"),
            cluster.delete(KEY, uid="u1"),
            cluster.replace_status(pod(5), {}),
            cluster.set_finalizers(pod(5), []),
            cluster.adopt(pod(5), {"labels": {}}),
            return_exceptions=True,
        )
        await asyncio.sleep(0)
        cluster.may_write = lambda: False
        assert [type(refused) for refused in await waiting] == 5 * [GateClosedError]
    assert server.requests == []


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (409, {"message": "the object has been modified"}, ConflictError),
        (422, {"message": "spec.replicas: must be an integer"}, ApiRejectedError),
        (403, {"message": "exceeded quota"}, ApiRejectedError),
        (403, {"details": {"causes": [{"reason": "NamespaceTerminating"}]}}, NamespaceClosingError),
        (500, {"message": "etcd is gone"}, ClusterError),
        (504, {"message": "time-out after commit"}, ClusterError),
        (502, "<html>bad gateway</html>", ClusterError),
        (200, '{"truncated":', ClusterError),
    ],
)
async def test_each_refusal_has_its_name(
    serve: Serve, status: int, body: Any, error: type[Exception]
) -> None:
    async with serve() as (server, cluster):
        cluster.cache.update(pod(5))
        server.answers["PATCH /api/v1/namespaces/lab/pods/p/status"] = [(status, body)]
        with pytest.raises(error) as raised:
            await cluster.replace_status(pod(5), {"phase": "Failed"})
    assert type(raised.value) is error


async def test_a_right_that_is_only_missing_yet_is_no_refusal(serve: Serve) -> None:
    async with serve() as (server, cluster):
        server.answers[f"GET {PODS}"] = [FORBIDDEN, listing(5)]
        for kind in (*OWN_KINDS, *CHILDREN):
            server.answers.setdefault(f"GET {path_of(kind)}", [listing(1)])
        await Watches(cluster.rest, cluster.cache).sync()
        server.answers["PATCH /api/v1/namespaces/lab/pods/p/status"] = [FORBIDDEN, (200, pod(6))]
        await cluster.replace_status(pod(5), {"phase": "Failed"})
        leases = KubernetesLeaseStore(cluster.rest, "lab", "l")
        server.answers[f"GET {path_of('Lease', 'lab', 'l')}"] = [FORBIDDEN]
        with pytest.raises(ClusterError):
            await leases.read()
        server.answers["PATCH /api/v1/namespaces/lab/pods/p/status"] = [FORBIDDEN]
        with pytest.raises(ApiRejectedError, match="cannot patch"):
            await cluster.replace_status(pod(5), {"phase": "Failed"})


async def test_a_delete_names_the_very_object_and_shows_at_once(serve: Serve) -> None:
    async with serve() as (server, cluster):
        cluster.cache.update(pod(5))
        server.answers[f"DELETE {POD}"] = [(200, pod(6)), (409, {})]
        server.answers["GET /api/v1/namespaces/lab/pods"] = [listing(7, pod(6))]
        await cluster.delete(KEY, uid="u1")
        found = cluster.get(KEY)
        await cluster.delete(KEY, uid="u0", grace_s=30)
    assert found is not None
    assert found["metadata"]["deletionTimestamp"]
    assert server.requests[0][2]["preconditions"] == {"uid": "u1"}
    assert "gracePeriodSeconds" not in server.requests[0][2]
    assert server.requests[1][2]["gracePeriodSeconds"] == 30


async def test_a_delete_that_meets_a_conflict_is_done_only_if_the_object_is_another(
    serve: Serve,
) -> None:
    async with serve() as (server, cluster):
        server.answers[f"DELETE {POD}"] = [(409, {})]
        found = [listing(7, pod(5)), listing(8, pod(6, uid="u2")), listing(9)]
        server.answers["GET /api/v1/namespaces/lab/pods"] = found
        with pytest.raises(ConflictError):
            await cluster.delete(KEY, uid="u1")
        for _ in range(2):
            cluster.cache.update(pod(5))
            await cluster.delete(KEY, uid="u1")
            assert cluster.get(KEY) is None


@pytest.mark.parametrize("owners", [[], ["o2"], ["o1"]])
async def test_a_child_that_went_is_made_again_only_while_its_owner_is_there(
    serve: Serve, owners: list[str]
) -> None:
    owner = pod(5, uid="o1")
    owner["metadata"]["name"] = "owner"
    child = pod(6, uid="c1")
    link = {"apiVersion": "v1", "kind": "Pod", "name": "owner", "uid": "o1", "controller": True}
    child["metadata"]["ownerReferences"] = [link]
    is_there = owners == ["o1"]
    async with serve() as (server, cluster):
        cluster.cache.update(owner)
        cluster.cache.update(child)
        cluster.cache.remove(KEY, "c1")
        found = [pod(9, uid=each) for each in owners]
        server.answers["GET /api/v1/namespaces/lab/pods"] = [listing(9, *found)]
        server.answers[f"POST {LAB_PODS}"] = [(201, pod(10, uid="c2"))]
        with contextlib.nullcontext() if is_there else pytest.raises(ConflictError):
            await cluster.apply(child, manager="m")
        assert (cluster.get(KEY) is not None) == is_there
        assert (cluster.get(KEY._replace(name="owner")) is not None) == is_there


async def test_a_change_names_the_very_object_so_that_nothing_is_made_anew(serve: Serve) -> None:
    pool = {**pod(5, uid="c1"), "apiVersion": "etude.dev/v1alpha1", "kind": "EnvPool"}
    async with serve() as (server, cluster):
        cluster.cache.update(pool)
        server.answers[f"PATCH {path_of('EnvPool', 'lab', 'p')}"] = [(409, {"reason": "Conflict"})]
        with pytest.raises(ConflictError):
            await cluster.apply(
                {**pool, "metadata": {"name": "p", "namespace": "lab"}}, manager="m"
            )
    ((_, _, body),) = server.requests
    assert body["metadata"]["uid"] == "c1"


async def test_a_status_is_written_as_a_patch_of_what_was_seen(serve: Serve) -> None:
    async with serve() as (server, cluster):
        server.answers["PATCH /api/v1/namespaces/lab/pods/p/status"] = [(200, pod(7))]
        seen = {**pod(5), "status": {"phase": "Running", "old": 1}}
        await cluster.replace_status(seen, {"phase": "Running", "new": [1]})
    assert server.requests[0][2] == {
        "metadata": {"resourceVersion": "5"},
        "status": {"old": None, "new": [1]},
    }


async def test_what_is_made_once_is_never_written_again(serve: Serve) -> None:
    async with serve() as (server, cluster):
        taken = {"reason": "AlreadyExists", "message": "it already exists"}
        server.answers[f"POST {path_of('JobSet', 'lab')}"] = [(409, taken)]
        server.answers[f"GET {path_of('JobSet', 'lab', 'demo')}"] = [(200, job_set())]
        for _ in range(2):
            assert await cluster.apply({**job_set(), "spec": {}}, manager="test") == job_set()
        assert [method for method, _, _ in server.requests] == ["POST", "GET"]
        path = path_of("JobSet", "lab", "demo")
        server.answers[f"DELETE {path}"] = [(200, {})]
        await cluster.delete(Ref("JobSet", "lab", "demo"), uid="u2")
    (body,) = (body for method, _, body in server.requests if method == "DELETE")
    assert body["propagationPolicy"] == "Foreground"
