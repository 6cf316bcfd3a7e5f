"""How children come to be and are changed, on an API server that answers as a test wants it to."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.kube.api_servers import ApiServer, serving

from etude.operator.kube.client import KubernetesCluster
from etude.operator.kube.interface import ConflictError, NameTakenError
from etude.operator.manifests import Manifest, Ref

SERVICES = "/api/v1/namespaces/lab/services"
KEY = Ref("Service", "lab", "p")
Serve = Callable[[], contextlib.AbstractAsyncContextManager[tuple[ApiServer, KubernetesCluster]]]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    return lambda: serving(tmp_path)


TAKEN = 409, {"reason": "AlreadyExists", "message": 'services "p" already exists'}


def service(version: int, owner: str = "ours", uid: str = "u1") -> Manifest:
    metadata = {"name": "p", "namespace": "lab", "uid": uid, "resourceVersion": str(version)}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            **metadata,
            "managedFields": [{"manager": "x"}],
            "ownerReferences": [{"uid": owner, "controller": True}],
        },
    }


async def test_what_is_not_known_is_created_by_one_strict_request(serve: Serve) -> None:
    async with serve() as (server, cluster):
        server.answers[f"POST {SERVICES}"] = [(201, service(5))]
        await cluster.apply(service(0), manager="test")
    ((method, path, body),) = server.requests
    assert (method, body) == ("POST", service(0))
    assert "fieldManager=test" in path
    assert "fieldValidation=Strict" in path, "what a schema does not know is not dropped in silence"


async def test_an_object_of_another_controller_is_not_touched(serve: Serve) -> None:
    async with serve() as (server, cluster):
        server.answers[f"POST {SERVICES}"] = [TAKEN]
        server.answers[f"GET {SERVICES}/p"] = [(200, service(5, "theirs"))]
        with pytest.raises(NameTakenError):
            await cluster.apply(service(0), manager="test")
        cluster.cache.update(service(6, "theirs"))
        with pytest.raises(NameTakenError):
            await cluster.apply(service(0), manager="test")
    assert [method for method, _, _ in server.requests] == ["POST", "GET"]


async def test_an_object_of_ours_that_no_watch_has_brought_is_changed(serve: Serve) -> None:
    async with serve() as (server, cluster):
        server.answers[f"POST {SERVICES}"] = [TAKEN]
        server.answers[f"GET {SERVICES}/p"] = [(200, service(5))]
        server.answers[f"PATCH {SERVICES}/p"] = [(200, service(6))]
        await cluster.apply(service(0), manager="test")
        assert cluster.get(KEY) is not None
    assert [method for method, _, _ in server.requests] == ["POST", "GET", "PATCH"]
    assert server.requests[-1][2]["metadata"]["uid"] == "u1"


async def test_whoever_creates_an_object_owns_it_as_whoever_applies(serve: Serve) -> None:
    """What is not said any more could not be taken away from an owner of another kind."""
    fields = {"f:metadata": {"f:labels": {"f:a": {}}}, "f:spec": {"f:x": {}}}
    made = {"manager": "test", "operation": "Update", "apiVersion": "v1", "fieldsV1": fields}
    kubelet = {"manager": "kubelet", "operation": "Update", "subresource": "status"}
    async with serve() as (server, cluster):
        cluster.cache.update(service(5))
        there = service(5)
        there["metadata"]["managedFields"] = [kubelet, made]
        server.answers[f"GET {SERVICES}/p"] = [(200, there)]
        server.answers[f"PATCH {SERVICES}/p"] = [(200, service(6)), (200, service(7))]
        await cluster.apply(service(0), manager="test")
    _, (_, _, owners), (_, path, _) = server.requests
    assert owners == {
        "metadata": {
            "resourceVersion": "5",
            "managedFields": [kubelet, {**made, "operation": "Apply"}],
        }
    }
    assert "force=true" in path


async def test_another_object_of_a_name_that_was_known_is_left_alone(serve: Serve) -> None:
    async with serve() as (server, cluster):
        cluster.cache.update(service(5))
        server.answers[f"GET {SERVICES}/p"] = [(200, service(7, uid="u2")), (404, {})]
        for _ in range(2):
            with pytest.raises(ConflictError):
                await cluster.apply(service(0), manager="test")
    assert {method for method, _, _ in server.requests} == {"GET"}
