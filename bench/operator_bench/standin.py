"""Stands in for every controller and broker of a cluster, on the addresses of their pods.

Started by the bench on the cluster's network, where every address of a pod is this process. A
caller's own address is the one that it dialled, which says whose pod is meant.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from tests.support.kube.api_client import ApiClient, connect_client
from typing_extensions import override

from etude.operator import names
from etude.operator.builders.addresses import PORTS
from etude.v1 import environments_pb2, environments_pb2_grpc, run_pb2, run_pb2_grpc
from operator_bench.api import GROUP, Object, follow, ticks
from operator_bench.manifests import LIFE, NAMESPACE, STEPS

STEP_S = 0.5
FOR_EVER_S = 1e6
LOOK_EVERY_S = 0.2

Watched = run_pb2.WatchRunResponse


@dataclass(slots=True)
class Runs:
    """Which run's trainer has which address."""

    api: ApiClient
    _by_address: dict[str, str] = field(default_factory=dict)
    _uids: dict[str, str] = field(default_factory=dict)

    async def follow(self) -> None:
        """Learn the addresses as pods get them."""
        path, trainers = f"/api/v1/namespaces/{NAMESPACE}/pods", f"{names.ROLE}={names.TRAINER}"
        await follow(self.api, path, self._seen, labelSelector=trainers)

    def _seen(self, _: str, pod: Object) -> None:
        address = pod.get("status", {}).get("podIP")
        if address:
            self._by_address[address] = pod["metadata"]["labels"][names.RUN]

    async def called(self, address: str) -> tuple[str, str]:
        """Name and uid of the run whose trainer was dialled."""
        async for _ in ticks(LOOK_EVERY_S):
            if address in self._by_address:
                break
        name = self._by_address[address]
        if name not in self._uids:  # a controller finds its own in a file
            found = await self.api.call("GET", f"{GROUP}/namespaces/{NAMESPACE}/rlruns/{name}")
            self._uids[name] = found["metadata"]["uid"]
        return name, self._uids[name]


@dataclass(slots=True)
class Controllers(run_pb2_grpc.RunServiceServicer):
    """Every run's controller."""

    runs: Runs
    stepped_s: float = field(default_factory=time.time)
    """When runs that only rest took their step; who connects anew hears the same."""

    @override
    async def WatchRun(
        self,
        request: run_pb2.WatchRunRequest,
        context: grpc.aio.ServicerContext[run_pb2.WatchRunRequest, Watched],
    ) -> AsyncIterator[Watched]:
        name, uid = await self.runs.called(_address(context.peer()))
        if name.startswith(LIFE):
            async for said in _life(uid, request.after_sequence):
                yield said
        else:
            yield _status(uid, run_pb2.RUN_STATE_RUNNING, step=1, at_s=self.stepped_s)
        await asyncio.sleep(FOR_EVER_S)

    @override
    async def Command(
        self,
        request: run_pb2.CommandRequest,
        context: grpc.aio.ServicerContext[run_pb2.CommandRequest, run_pb2.CommandResponse],
    ) -> run_pb2.CommandResponse:
        return run_pb2.CommandResponse()


class Brokers(environments_pb2_grpc.PoolServiceServicer):
    """Every pool's broker."""

    @override
    async def WatchPool(
        self,
        request: environments_pb2.WatchPoolRequest,
        context: grpc.aio.ServicerContext[
            environments_pb2.WatchPoolRequest, environments_pb2.WatchPoolResponse
        ],
    ) -> AsyncIterator[environments_pb2.WatchPoolResponse]:
        yield environments_pb2.WatchPoolResponse(sequence=1, slots=64, driver="process")
        await asyncio.sleep(FOR_EVER_S)

    @override
    async def Drain(
        self,
        request: environments_pb2.DrainRequest,
        context: grpc.aio.ServicerContext[
            environments_pb2.DrainRequest, environments_pb2.DrainResponse
        ],
    ) -> environments_pb2.DrainResponse:
        return environments_pb2.DrainResponse()

    @override
    async def UpdatePool(
        self,
        request: environments_pb2.UpdatePoolRequest,
        context: grpc.aio.ServicerContext[
            environments_pb2.UpdatePoolRequest, environments_pb2.UpdatePoolResponse
        ],
    ) -> environments_pb2.UpdatePoolResponse:
        return environments_pb2.UpdatePoolResponse()


async def _life(uid: str, after: int) -> AsyncIterator[Watched]:
    """Load, step, save, step, save, be done."""
    yield _status(uid, run_pb2.RUN_STATE_LOADING, step=0)
    if after < 1:
        yield Watched(run_uid=uid, epoch=1, sequence=1, event=run_pb2.RunEvent(reason="Resumed"))
    for step in range(1, STEPS + 1):
        await asyncio.sleep(STEP_S)
        yield _status(uid, run_pb2.RUN_STATE_RUNNING, step=step)
        if step % (STEPS // 2) == 0:
            sequence = 1 + step // (STEPS // 2)
            yield _status(uid, run_pb2.RUN_STATE_CHECKPOINTING, step=step)
            if sequence > after:
                record = _checkpoint(uid, step)
                yield Watched(run_uid=uid, epoch=1, sequence=sequence, checkpoint=record)
    yield _status(uid, run_pb2.RUN_STATE_DONE, step=STEPS)


def _status(uid: str, state: run_pb2.RunState, *, step: int, at_s: float | None = None) -> Watched:
    said = run_pb2.RunStatus(
        state=state,
        phase="sft",
        step=step,
        target_step=STEPS,
        policy_version=step,
        last_step_unix_ms=int((at_s or time.time()) * 1000) if step else 0,
        observed_generation=1_000_000,  # whatever was asked for has arrived
    )
    return Watched(run_uid=uid, epoch=1, sequence=0, status=said)


def _checkpoint(uid: str, step: int) -> run_pb2.CheckpointRecord:
    digest = f"{step:02d}{uid.replace('-', '')}"[:32].ljust(64, "0")
    return run_pb2.CheckpointRecord(
        step=step,
        policy_version=step,
        reason="Final" if step == STEPS else "Scheduled",
        uri=f"s3://bench/{uid}/checkpoints/{step}",
        manifest_digest=digest,
        size_bytes=1,
    )


def _address(peer: str) -> str:
    """The address in `ipv4:10.245.0.1:7000`."""
    return peer.split(":")[1]


async def serve(known: Object) -> None:
    """Answer for all of them until ended."""
    async with connect_client(known, limit_s=None) as api:
        runs = Runs(api)
        # By default a client that pings an idle stream is taken for an attacker.
        options = [
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.so_reuseport", 0),
        ]
        server = grpc.aio.server(options=options)
        run_pb2_grpc.add_RunServiceServicer_to_server(Controllers(runs), server)
        environments_pb2_grpc.add_PoolServiceServicer_to_server(Brokers(), server)
        for role in (names.TRAINER, names.BROKER):
            server.add_insecure_port(f"0.0.0.0:{PORTS[role]['grpc']}")
        await server.start()
        async with asyncio.TaskGroup() as group:
            group.create_task(runs.follow(), name="addresses")
            group.create_task(server.wait_for_termination(), name="server")


if __name__ == "__main__":
    asyncio.run(serve(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
