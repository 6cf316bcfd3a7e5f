"""The operator's trace spans, as a collector receives them."""

import itertools
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import NoOpTracer
from tests.support.collectors import Collector, attributes, collector

from etude.operator import tracing
from etude.operator.builders.platform import Platform
from etude.operator.clock import ManualClock
from etude.operator.controller.operator import open_operator
from etude.operator.controller.status_writer import StatusDebounce
from etude.operator.kube.cache import WatchCache
from etude.operator.kube.client import KubernetesCluster
from etude.operator.kube.rest import RestClient
from etude.operator.manifests import Ref
from etude.operator.remotes.clients import MemoryRemoteClient

KEY = Ref("Checkpoint", "lab", "c")
CHECKPOINT: dict[str, Any] = {
    "apiVersion": "etude.dev/v1alpha1",
    "kind": "Checkpoint",
    "metadata": {"name": "c", "namespace": "lab", "uid": "u", "generation": 1},
    "spec": {
        "runRef": {"name": "demo", "uid": "r"},
        "reason": "Scheduled",
        "source": {"uri": "s3://runs/demo/c", "manifestDigest": "0" * 64},
        "storage": {"uri": "s3://runs/demo"},
        "step": 3,
        "policyVersion": 3,
        "deletionPolicy": "Delete",
    },
}
KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: c
contexts: [{{name: c, context: {{cluster: c, user: u}}}}]
clusters: [{{name: c, cluster: {{server: "{server}"}}}}]
users: [{{name: u, user: {{token: t}}}}]
"""


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[KubernetesCluster]:
    """A cluster whose API server takes every change, and refuses what names a Job."""
    versions = itertools.count(2)

    async def handle(request: web.Request) -> web.Response:
        if "/jobs" in request.path:
            return web.json_response({"message": "etcd is gone"}, status=500)
        body = json.loads(await request.text() or "{}")
        changed = {**CHECKPOINT["metadata"], **body.get("metadata", {})}
        changed["resourceVersion"] = str(next(versions))
        return web.json_response({**CHECKPOINT, **body, "metadata": changed})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    file = tmp_path / "kubeconfig"
    file.write_text(KUBECONFIG.format(server=f"http://{host}:{port}"))
    rest = await RestClient.connect(file)
    yield KubernetesCluster(rest, WatchCache())
    await rest.close()
    await runner.cleanup()


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Collector, TracerProvider]]:
    """A collector that listens, and the provider that the operator's spans go through."""
    with collector() as made:
        provider = TracerProvider()
        exporter = OTLPSpanExporter(made.endpoint, insecure=True)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        monkeypatch.setattr(tracing, "tracer", provider.get_tracer("etude.operator"))
        yield made, provider
        provider.shutdown()


async def test_a_pass_is_a_span_and_its_requests_are_below_it(
    cluster: KubernetesCluster, collected: tuple[Collector, TracerProvider]
) -> None:
    received, provider = collected
    cluster.cache.update(
        {**CHECKPOINT, "metadata": {**CHECKPOINT["metadata"], "resourceVersion": "1"}}
    )
    platform = Platform(images={"operator": "etude:1"})
    loop = open_operator(
        cluster,
        MemoryRemoteClient(),
        platform,
        ManualClock(),
        instance="test",
        debounce=StatusDebounce(figures_s=0.0),
    )
    async with loop as acting:
        await acting.reconcile_key(KEY)  # its finalizer
        await acting.reconcile_key(KEY)  # its Job, which the API server does not take
    provider.force_flush()
    first, second = received.named("etude.reconcile")
    assert attributes(first) == {
        "k8s.namespace.name": "lab",
        "etude.kind": "Checkpoint",
        "etude.name": "c",
        "etude.actions": 1,
        "etude.result": "ok",
    }
    (written,) = received.named("PATCH checkpoints")
    assert (written.parent_span_id, written.trace_id) == (first.span_id, first.trace_id)
    assert attributes(written)["http.response.status_code"] == 200
    assert attributes(second)["etude.result"] == "error"
    assert second.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    (refused,) = received.named("POST jobs")
    assert refused.parent_span_id == second.span_id
    assert refused.status.code == trace_pb2.Status.STATUS_CODE_ERROR


async def test_without_a_collector_a_request_makes_no_span(
    cluster: KubernetesCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A collector that another test has set up stays with the process.
    monkeypatch.setattr(tracing, "tracer", NoOpTracer())
    with tracing.trace_reconcile(KEY), tracing.trace_request("GET", "jobs") as told:
        told(200)
        assert told is tracing._ignore_status
