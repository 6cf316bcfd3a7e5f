"""A trainer that only counts: the controller's own reports, orders and service, no learning."""

import asyncio
import json
import os
import sys
from pathlib import Path
from urllib.parse import urlparse

from etude.common.blobs import open_store
from etude.common.checkpoints import manifest
from etude.common.probes import Probes
from etude.common.process import shutdown_signals
from etude.common.role_inputs import read_run
from etude.common.rpc.server import Server
from etude.trainer.controller.reporting.commands import RunCommands
from etude.trainer.controller.reporting.reports import NAME, RunReports, RunService
from etude.v1 import run_pb2, run_pb2_grpc

STEP_S = 0.05


class Run:
    """Finishes a step every 50 ms, saves and suspends when asked to."""

    def __init__(self) -> None:
        self.resolved = read_run(Path(os.environ["ETUDE_RUN_FILE"]))
        self.folder = Path(urlparse(self.resolved.spec.storage.uri).path)
        self.store = open_store(self.resolved.spec.storage.uri)
        epoch = len(list(self.folder.glob("epoch-*"))) + 1
        (self.folder / f"epoch-{epoch}").touch()
        self.reports = RunReports(self.resolved.uid, epoch)
        self.orders = RunCommands(self.resolved.spec, self.resolved.generation)

    async def train(self) -> None:
        phase, status = self.resolved.spec.phases[0], self.reports.status
        status.phase, status.target_step = phase.name, phase.max_steps
        status.step = max(
            (place.step for place in manifest.list_checkpoints(self.store)), default=0
        )
        self.reports.set_state(run_pb2.RUN_STATE_RUNNING)
        while status.step < status.target_step:
            await asyncio.sleep(STEP_S)
            if self.orders.suspend is not None:
                self.save("Suspend")
                self.reports.set_state(run_pb2.RUN_STATE_SUSPENDED)
                return
            status.step += 1
            self.reports.mark_changed()
            with (self.folder / "steps.txt").open("a") as steps:
                steps.write(f"{self.reports.epoch} {status.step}\n")
        self.save("Final")
        self.reports.set_state(run_pb2.RUN_STATE_DONE)

    def save(self, reason: manifest.Reason) -> None:
        """A small but complete checkpoint."""
        status = self.reports.status
        prefix = manifest.CheckpointId(0, status.step).prefix
        self.store.put(prefix + "state", json.dumps(status.step).encode())
        found = manifest.write_manifest(
            self.store,
            manifest.CheckpointManifest(
                run=self.resolved.uid,
                step=status.step,
                phase=status.phase,
                phase_step=status.step,
                epoch=self.reports.epoch,
                policy_version=0,
                reason=reason,
                objects=[manifest.describe_object(self.store, prefix, "state")],
            ),
        )
        uri = f"{self.resolved.spec.storage.uri}/{prefix.rstrip('/')}"
        self.reports.add_checkpoint(found, uri=uri)


async def main() -> None:
    """Serve until told to stop."""
    stop = asyncio.Event()
    with shutdown_signals(stop):
        run = Run()
        server = Server([NAME], port=int(os.environ["ETUDE_PORT"]))
        service = RunService(run.reports, run.orders)
        run_pb2_grpc.add_RunServiceServicer_to_server(service, server.grpc_server)
        probes = Probes(int(os.environ["ETUDE_PROBE_PORT"]))
        await server.start()
        await probes.start()
        probes.ready = True
        training = asyncio.create_task(run.train())
        await stop.wait()
        training.cancel()
        await server.stop(0.1)


if os.environ.get("STUB_EXIT"):
    sys.stderr.write("storage.uri: nothing is there\n")
    sys.exit(int(os.environ["STUB_EXIT"]))
asyncio.run(main())
