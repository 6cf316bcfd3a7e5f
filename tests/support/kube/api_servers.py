"""An API server that answers as a test wants it to, and the operator's client of it."""

import asyncio
import contextlib
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from etude.operator.kube.cache import WatchCache
from etude.operator.kube.client import KubernetesCluster
from etude.operator.kube.rest import RestClient
from etude.operator.manifests import Manifest, Ref

LIMIT_S = 60.0
PODS = "/api/v1/pods"
LAB_PODS = "/api/v1/namespaces/lab/pods"
KEY = Ref("Pod", "lab", "p")
POD = "/api/v1/namespaces/lab/pods/p"
FORBIDDEN = 403, {"message": 'pods "p" is forbidden: User "us" cannot patch resource "pods"'}
KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: c
contexts: [{{name: c, context: {{cluster: c, user: u}}}}]
clusters: [{{name: c, cluster: {{server: "{server}"}}}}]
users: [{{name: u, user: {{token: t}}}}]
"""


def pod(version: int, *, uid: str = "u1", phase: str = "Running") -> Manifest:
    """The pod of KEY at a version."""
    metadata = {"name": "p", "namespace": "lab", "uid": uid, "resourceVersion": str(version)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**metadata, "managedFields": [{"manager": "x"}]},
        "status": {"phase": phase},
    }


def job_set() -> Manifest:
    """One of a kind that is made once."""
    metadata = {"name": "demo", "namespace": "lab", "uid": "u2", "resourceVersion": "3"}
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata}


def listing(version: int, *items: Manifest) -> tuple[int, Any]:
    """The answer to a list."""
    return 200, {"metadata": {"resourceVersion": str(version)}, "items": list(items)}


class ApiServer:
    """Answers from lists: one per method and path, the last answer again and again."""

    def __init__(self) -> None:
        self.answers: defaultdict[str, list[tuple[int, Any]]] = defaultdict(list)
        self.watches: list[list[dict[str, Any]]] = []
        self.watch_status = 200
        self.requests: list[tuple[str, str, Any]] = []
        self.headers: dict[str, str] = {}
        self.pause_s = 0.0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.text()
        self.requests.append((request.method, request.path_qs, json.loads(body) if body else None))
        if "watch" in request.query:
            return await self._watch(request)
        await asyncio.sleep(self.pause_s)
        answers = self.answers[f"{request.method} {request.path}"]
        status, content = answers.pop(0) if len(answers) > 1 else (answers or [(404, {})])[0]
        text = content if isinstance(content, str) else json.dumps(content)
        return web.Response(status=status, text=text, headers=self.headers)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=self.watch_status)
        await response.prepare(request)
        events = self.watches.pop(0) if request.path == PODS and self.watches else None
        for event in events or ():
            await response.write(json.dumps(event).encode() + b"\n")
        if events is None and self.watch_status == 200:
            await asyncio.sleep(LIMIT_S)
        return response


@contextlib.asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[ApiServer, KubernetesCluster]]:
    """A server, and a cluster that reaches it by a kubeconfig in the folder."""
    server = ApiServer()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    file = folder / "kubeconfig"
    file.write_text(KUBECONFIG.format(server=f"http://{host}:{port}"))
    rest = await RestClient.connect(file)
    try:
        async with asyncio.timeout(LIMIT_S):
            yield server, KubernetesCluster(rest, WatchCache())
    finally:
        await rest.close()
        await runner.cleanup()


Serve = Callable[[], contextlib.AbstractAsyncContextManager[tuple[ApiServer, KubernetesCluster]]]
