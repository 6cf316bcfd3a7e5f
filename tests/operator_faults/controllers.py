"""Stand-ins for the processes of a run's pods: a controller that counts, a broker with slots."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Container
from dataclasses import dataclass, field

import grpc
from tests.operator_faults.observer import Scenery
from typing_extensions import override

from etude.common.api.kinds import RLRun
from etude.common.checkpoints.manifest import CheckpointManifest, StoredCheckpoint
from etude.operator import names
from etude.operator.builders.addresses import PORTS
from etude.operator.manifests import Manifest, Ref, labels
from etude.trainer.controller.reporting.commands import RunCommands
from etude.trainer.controller.reporting.reports import RunReports, RunService
from etude.v1 import environments_pb2, environments_pb2_grpc, run_pb2, run_pb2_grpc

LAST_STEP = 20
OPTIONS = [
    ("grpc.so_reuseport", 0),
    # The operator's channels ping while idle.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
]


@dataclass(slots=True)
class Kept:
    """What lies in the store of one run: it outlives every process."""

    epoch: int = 0
    saved: list[tuple[int, str]] = field(default_factory=list)
    """Steps and why they were saved."""
    orders: list[str] = field(default_factory=list)
    """What controllers were told, each order once."""
    may_finish: asyncio.Event = field(default_factory=asyncio.Event)
    """Until then the run goes on at the step before the last."""


class BookedOrders(RunCommands):
    """Notes which orders came."""

    kept: Kept

    @override
    def accept(self, request: run_pb2.CommandRequest) -> None:
        is_new = request.command_id not in self._seen
        RunCommands.accept(self, request)
        if is_new:
            self.kept.orders.append(request.WhichOneof("what") or "")


@dataclass(slots=True)
class Controller:
    """A trainer that saves twice and is done; it goes on only once the operator has seen it."""

    run: RLRun
    kept: Kept
    scenery: Scenery

    async def serve(self, address: str) -> None:
        """Answer on an address and train, until cancelled."""
        self.kept.epoch += 1
        reports = RunReports(self.run.metadata.uid, self.kept.epoch)
        orders = BookedOrders(self.run.spec, self.run.metadata.generation)
        orders.kept = self.kept
        server = grpc.aio.server(options=OPTIONS)
        service = RunService(reports, orders)
        run_pb2_grpc.add_RunServiceServicer_to_server(service, server)
        server.add_insecure_port(f"{address}:{PORTS[names.TRAINER]['grpc']}")
        await server.start()
        try:
            async with asyncio.TaskGroup() as group:
                training = group.create_task(self._train(reports, orders))
                group.create_task(self._obey(reports, orders, training))
                group.create_task(self._observe(reports, orders))
        finally:
            await server.stop(0)

    async def _train(self, reports: RunReports, orders: RunCommands) -> None:
        status = reports.status
        status.phase, status.target_step = self.run.spec.phases[-1].name, LAST_STEP
        status.observed_generation = orders.generation
        reports.set_state(run_pb2.RUN_STATE_LOADING)
        saved = list(self.kept.saved)
        for step, reason in saved:
            self._tell(reports, step, reason)
        if saved:
            status.step = saved[-1][0]
            reports.add_event("Resumed", f"from the checkpoint of step {status.step}")
        reports.set_state(run_pb2.RUN_STATE_RUNNING)
        await self._seen_running()
        if status.step < LAST_STEP // 2:
            status.step = LAST_STEP // 2
            self._save(reports, "Scheduled")
            await self._seen_saved(status.step)
        await self.kept.may_finish.wait()
        if status.step < LAST_STEP:
            status.step = LAST_STEP
            self._save(reports, "Final")
        reports.set_state(run_pb2.RUN_STATE_DONE)

    async def _obey(
        self, reports: RunReports, orders: RunCommands, training: "asyncio.Task[None]"
    ) -> None:
        await orders.stop_requested.wait()
        training.cancel()
        reports.status.step += 1
        self._save(reports, "Suspend")
        reports.set_state(run_pb2.RUN_STATE_SUSPENDED)

    async def _observe(self, reports: RunReports, orders: RunCommands) -> None:
        """Say which spec it runs, as soon as it was told of a newer one."""
        while True:
            await asyncio.sleep(0.05)
            if orders.generation > reports.status.observed_generation:
                reports.status.observed_generation = orders.generation
                reports.mark_changed()

    def _save(self, reports: RunReports, reason: str) -> None:
        self.kept.saved.append((reports.status.step, reason))
        self._tell(reports, reports.status.step, reason)

    def _tell(self, reports: RunReports, step: int, reason: str) -> None:
        manifest = CheckpointManifest.model_validate(
            {
                "run": self.run.metadata.uid,
                "step": step,
                "phase": self.run.spec.phases[-1].name,
                "phase_step": step,
                "epoch": 1,
                "policy_version": step,
                "reason": reason,
                "objects": [{"key": "state", "size": 1, "blake3": "0" * 64}],
            }
        )
        digest = hashlib.sha256(f"{step}".encode()).hexdigest()
        uri = f"{self.run.spec.storage.uri}/{manifest.checkpoint_id.prefix.rstrip('/')}"
        reports.add_checkpoint(
            StoredCheckpoint(manifest, manifest.checkpoint_id.prefix, digest), uri=uri
        )

    async def _seen_running(self) -> None:
        metadata = self.run.metadata
        key = Ref("RLRun", metadata.namespace, metadata.name)
        await self.scenery.until(
            lambda: self.scenery.objects.get(key, {}).get("status", {}).get("phase") == "Running"
        )

    async def _seen_saved(self, step: int) -> None:
        def is_ready() -> bool:
            return any(
                found["spec"]["step"] == step and found.get("status", {}).get("phase") == "Ready"
                for found in self.scenery.every("Checkpoint")
            )

        await self.scenery.until(is_ready)


class Broker(environments_pb2_grpc.PoolServiceServicer):
    """Says what a pool has; nobody leases from its nodes but from those that a test names."""

    def __init__(self, leased: Container[str]) -> None:
        self.leased = leased

    @override
    async def WatchPool(
        self,
        request: environments_pb2.WatchPoolRequest,
        context: grpc.aio.ServicerContext[
            environments_pb2.WatchPoolRequest, environments_pb2.WatchPoolResponse
        ],
    ) -> AsyncIterator[environments_pb2.WatchPoolResponse]:
        yield environments_pb2.WatchPoolResponse(sequence=1, slots=4, driver="Process")
        await asyncio.Event().wait()

    @override
    async def Drain(
        self,
        request: environments_pb2.DrainRequest,
        context: grpc.aio.ServicerContext[
            environments_pb2.DrainRequest, environments_pb2.DrainResponse
        ],
    ) -> environments_pb2.DrainResponse:
        empty = [name for name in request.node_ids if name not in self.leased]
        return environments_pb2.DrainResponse(empty_node_ids=empty)

    @override
    async def UpdatePool(
        self,
        request: environments_pb2.UpdatePoolRequest,
        context: grpc.aio.ServicerContext[
            environments_pb2.UpdatePoolRequest, environments_pb2.UpdatePoolResponse
        ],
    ) -> environments_pb2.UpdatePoolResponse:
        return environments_pb2.UpdatePoolResponse()


async def serve_pool(address: str, leased: Container[str]) -> None:
    """Be a broker until cancelled; `leased` are the nodes that are in use."""
    server = grpc.aio.server(options=OPTIONS)
    environments_pb2_grpc.add_PoolServiceServicer_to_server(Broker(leased), server)
    server.add_insecure_port(f"{address}:{PORTS[names.BROKER]['grpc']}")
    await server.start()
    try:
        await asyncio.Event().wait()
    finally:
        await server.stop(0)


def role(pod: Manifest) -> str:
    """What a pod is for."""
    return labels(pod).get(names.ROLE, "")
