"""How kopf follows our kinds, on an API server that answers as a test wants it to."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from kopf._cogs.aiokits import aiotoggles
from kopf._cogs.clients import watching
from kopf._cogs.structs import references

from etude.operator.controller import kopf_source
from etude.operator.manifests import OWN_KINDS, RESOURCES, Manifest

LIMIT_S = 20.0
GROUP = "/apis/etude.dev/v1alpha1"
POOLS = f"{GROUP}/envpools"
KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: c
contexts: [{{name: c, context: {{cluster: c, user: u}}}}]
clusters: [{{name: c, cluster: {{server: "{server}"}}}}]
users: [{{name: u, user: {{token: t}}}}]
"""
POOL: Manifest = {
    "apiVersion": "etude.dev/v1alpha1",
    "kind": "EnvPool",
    "metadata": {"name": "p", "namespace": "lab", "uid": "u1", "resourceVersion": "7"},
}
NAMESPACES = {
    "name": "namespaces",
    "singularName": "namespace",
    "kind": "Namespace",
    "namespaced": False,
    "verbs": ["list", "watch"],
}
RUNS = references.Resource(group="etude.dev", version="v1alpha1", plural="rlruns")
GOOD = json.dumps({"type": "ADDED", "object": POOL}).encode() + b"\n"


def status(code: int) -> Manifest:
    return {"kind": "Status", "status": "Failure", "code": code, "message": "as the test wants it"}


def error(code: int) -> bytes:
    return json.dumps({"type": "ERROR", "object": status(code)}).encode() + b"\n"


class ApiServer:
    """Knows our kinds, has none of them, and answers the first watch of pools badly."""

    def __init__(self, code: int, body: bytes, *, breaks_off: bool = False) -> None:
        self.first = (code, body)
        self.breaks_off = breaks_off
        """Whether every watch of runs is broken off without an answer."""
        self.watches = 0
        self.broken = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            return await self._watch(request)
        return web.json_response(self._answer(request.path))

    def _answer(self, path: str) -> Manifest:
        version = {"groupVersion": "etude.dev/v1alpha1", "version": "v1alpha1"}
        group = {"name": "etude.dev", "versions": [version], "preferredVersion": version}
        listed: dict[str, Manifest] = {
            "/api": {"versions": ["v1"]},
            "/apis": {"groups": [group]},
            "/api/v1": {"resources": [NAMESPACES]},
            GROUP: {"resources": [resource(kind) for kind in OWN_KINDS]},
        }
        return listed.get(path, {"metadata": {"resourceVersion": "5"}, "items": []})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        if self.breaks_off and self.watches < 2 and request.path.endswith("/rlruns"):
            assert request.transport is not None
            request.transport.abort()
            self.broken.set()
        is_pools = request.path.endswith("/envpools")
        self.watches += is_pools
        is_first = is_pools and self.watches == 1
        if is_first and self.breaks_off:
            await self.broken.wait()
        code, body = self.first if is_first else (200, GOOD if is_pools else b"")
        response = web.StreamResponse(status=code, headers={"Content-Type": "application/json"})
        await response.prepare(request)
        await response.write(body)
        if not is_first:
            await asyncio.sleep(LIMIT_S)
        return response


def resource(kind: str) -> dict[str, Any]:
    return {
        "name": RESOURCES[kind].plural,
        "singularName": kind.lower(),
        "kind": kind,
        "namespaced": True,
        "verbs": ["list", "watch", "patch"],
    }


@contextlib.asynccontextmanager
async def serving(server: ApiServer, file: Path) -> AsyncIterator[Path]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    file.write_text(KUBECONFIG.format(server=f"http://{host}:{port}"))  # noqa: ASYNC240 - short
    try:
        yield file
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("code", "body"),
    [
        (410, json.dumps(status(410)).encode()),
        (403, json.dumps(status(403)).encode()),
        (200, error(500)),
        (200, GOOD[: len(GOOD) // 2]),
    ],
    ids=["too-old", "forbidden", "error-event", "half-an-object"],
)
async def test_p09_a_watch_that_ends_badly_is_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, body: bytes
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    await is_begun_anew(ApiServer(code, body), tmp_path / "kubeconfig")


async def test_p09_a_watch_that_ends_while_another_repeats_its_request_is_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    server = ApiServer(410, json.dumps(status(410)).encode(), breaks_off=True)
    await is_begun_anew(server, tmp_path / "kubeconfig")


async def test_a_watch_that_repeats_a_request_ends_when_all_tasks_are_cancelled_once() -> None:
    paused = aiotoggles.ToggleSet(any)
    restarts = 0

    async def watch() -> None:
        nonlocal restarts
        while restarts < 4:
            restarts += 1
            async with watching.streaming_block(
                namespace="lab", resource=RUNS, operator_paused=paused
            ) as waiter:
                try:
                    await asyncio.sleep(LIMIT_S)
                except asyncio.CancelledError:
                    # As kopf's stream does while it waits to repeat a request.
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                    if not waiter.done():
                        raise

    task = asyncio.create_task(watch())
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    async with asyncio.timeout(LIMIT_S):
        await kopf_source._cancel_all()

    assert task.cancelled()
    assert restarts == 1


async def is_begun_anew(server: ApiServer, kubeconfig: Path) -> None:
    """Watch until the pool is seen, which the first watch of pools does not tell."""
    seen = asyncio.Event()

    def observe(kind: str, manifest: Manifest) -> None:
        assert (kind, manifest["metadata"]["name"]) == ("ADDED", "p")
        seen.set()

    async with asyncio.timeout(LIMIT_S), serving(server, kubeconfig) as file:
        watching = asyncio.create_task(
            kopf_source.watch_own_kinds(observe, namespaces=("lab",), kubeconfig=file)
        )
        await asyncio.wait(
            {watching, asyncio.ensure_future(seen.wait())}, return_when="FIRST_COMPLETED"
        )
        assert not watching.done(), watching.exception()
        assert server.watches > 1
        watching.cancel()
        await asyncio.wait({watching})
