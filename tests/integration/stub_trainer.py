"""Stands in for a trainer: serves the run's gRPC, finishes a step every 50 ms, obeys orders."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlparse

import grpc
from typing_extensions import override

from etude.common import checkpoints
from etude.common.blobs import open_store
from etude.common.files import read_run
from etude.common.probes import Probes
from etude.common.serving import Server, shutdown_signals
from etude.v1 import run_pb2, run_pb2_grpc

STEP_S = 0.05


class Controller(run_pb2_grpc.RunServiceServicer):
    """A run that counts."""

    def __init__(self, stop: asyncio.Event) -> None:
        self.resolved = read_run(Path(os.environ["ETUDE_RUN_FILE"]))
        self.folder = Path(urlparse(self.resolved.spec.storage.uri).path)
        self.store = open_store(self.resolved.spec.storage.uri)
        self.stop = stop
        self.epoch = len(list(self.folder.glob("epoch-*"))) + 1
        (self.folder / f"epoch-{self.epoch}").touch()
        self.status = run_pb2.RunStatus(state=run_pb2.RUN_STATE_RUNNING)
        self.status.phase = self.resolved.spec.phases[0].name
        self.status.target_step = self.resolved.spec.phases[0].max_steps
        self.status.step = max(checkpoints.steps(self.store), default=0)
        self.records: list[run_pb2.CheckpointRecord] = []
        self.wants_suspend = False

    async def train(self) -> None:
        while self.status.step < self.status.target_step:
            await asyncio.sleep(STEP_S)
            if self.wants_suspend:
                self.save()
                self.status.state = run_pb2.RUN_STATE_SUSPENDED
                return
            self.status.step += 1
            with (self.folder / "steps.txt").open("a") as steps:
                steps.write(f"{self.epoch} {self.status.step}\n")
        self.save()
        self.status.state = run_pb2.RUN_STATE_DONE

    def save(self) -> None:
        """A small but complete checkpoint."""
        step = self.status.step
        prefix = checkpoints.prefix_of(step)
        self.store.put(prefix + "state", json.dumps(step).encode())
        found = checkpoints.commit(
            self.store,
            checkpoints.CheckpointManifest(
                run=self.resolved.uid,
                step=step,
                phase=self.status.phase,
                phase_step=step,
                epoch=self.epoch,
                policy_version=0,
                reason="Suspend",
                objects=[checkpoints.described(self.store, prefix, "state")],
            ),
        )
        self.records.append(
            run_pb2.CheckpointRecord(
                step=step,
                reason="Suspend",
                uri=f"{self.resolved.spec.storage.uri}/{prefix.rstrip('/')}",
                manifest_digest=found.digest,
                size_bytes=found.manifest.size_bytes,
            )
        )

    @override
    async def WatchRun(
        self,
        request: run_pb2.WatchRunRequest,
        context: grpc.aio.ServicerContext[run_pb2.WatchRunRequest, run_pb2.WatchRunResponse],
    ) -> AsyncIterator[run_pb2.WatchRunResponse]:
        sequence, told = 0, 0
        while not self.stop.is_set():
            sequence += 1
            answer = run_pb2.WatchRunResponse(run_uid=self.resolved.uid, epoch=self.epoch)
            answer.sequence = sequence
            if told < len(self.records):
                answer.checkpoint.CopyFrom(self.records[told])
                told += 1
            else:
                answer.status.CopyFrom(self.status)
                await asyncio.sleep(STEP_S)
            yield answer

    @override
    async def Command(
        self,
        request: run_pb2.CommandRequest,
        context: grpc.aio.ServicerContext[run_pb2.CommandRequest, run_pb2.CommandResponse],
    ) -> run_pb2.CommandResponse:
        self.wants_suspend = self.wants_suspend or request.HasField("suspend")
        return run_pb2.CommandResponse()


async def main() -> None:
    """Serve until told to stop."""
    stop = asyncio.Event()
    with shutdown_signals(stop):
        controller = Controller(stop)
        server = Server(["etude.v1.RunService"], port=int(os.environ["ETUDE_PORT"]))
        run_pb2_grpc.add_RunServiceServicer_to_server(controller, server.grpc_server)
        probes = Probes(int(os.environ["ETUDE_PROBE_PORT"]))
        await server.start()
        await probes.start()
        probes.ready = True
        training = asyncio.create_task(controller.train())
        await stop.wait()
        training.cancel()
        await server.stop(0.1)


if os.environ.get("STUB_EXIT"):
    sys.stderr.write("storage.uri: nothing is there\n")
    sys.exit(int(os.environ["STUB_EXIT"]))
asyncio.run(main())
