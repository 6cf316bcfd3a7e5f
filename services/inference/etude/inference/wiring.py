"""Wiring of one replica: servers, follower and health probes around a built engine."""

import asyncio
import secrets
from dataclasses import dataclass, field

from etude.common.probes import Probes
from etude.common.role_inputs import ResolvedRun
from etude.common.rpc.server import Server
from etude.common.stores import open_run_store
from etude.inference.engine.replica import Replica
from etude.inference.engine.speculation import SpeculationGuard
from etude.inference.lending import LendingControl
from etude.inference.service import SERVICES, InferenceServicer, WeightServicer
from etude.inference.serving.openai import HttpServer, PolicyVersionMiddleware
from etude.inference.serving.openai_app import build_openai_app
from etude.inference.settings import Settings
from etude.inference.status import ReplicaStatus
from etude.inference.updates.channel import FollowedChannel
from etude.inference.updates.follower import VersionFollower
from etude.inference.updates.staging import Stager
from etude.v1 import inference_pb2_grpc, weights_pb2_grpc


@dataclass(slots=True, kw_only=True)
class InferenceRole:
    """Listens, follows the run's versions, and publishes readiness."""

    settings: Settings
    run: ResolvedRun
    replica: Replica
    probes: Probes
    follower: VersionFollower = field(init=False)
    _instance: str = field(init=False)
    _server: Server = field(init=False)
    _http: HttpServer = field(init=False)

    def __post_init__(self) -> None:
        # A process that replaces another has the same address, but not its memory.
        self._instance = f"{self.settings.pod}.{secrets.token_hex(4)}"
        store = open_run_store(self.run.spec.storage.uri, self.run.spec.storage)
        channel = self.settings.channel
        self.follower = VersionFollower(
            stager=Stager(store, self.run.uid, self.settings.scratch),
            channel=FollowedChannel(
                store=store,
                name=channel,
                run_uid=self.run.uid,
                lending=LendingControl(self.settings.lending_run, self.settings.lending_window_s),
            )
            if channel
            else None,
            engine=self.replica,
            status=ReplicaStatus(replica=self.settings.pod),
            audit_every=self.replica.options.audit_every,
            instance=self._instance,
        )
        self._server = Server(SERVICES, self.settings.host, self.settings.port)

    async def start(self) -> None:
        """Listen on both ports; health stays NOT_SERVING until a version is live.

        Raises:
            OSError: a port is taken.
        """
        app = await build_openai_app(self.replica)
        self._http = HttpServer(
            PolicyVersionMiddleware(app, self._live_version),
            self.settings.host,
            self.settings.http_port,
        )
        await self._http.start()
        inference = InferenceServicer(
            engine=self.replica,
            http_port=self._http.port,
            run_uid=self.run.uid,
            instance=self._instance,
            lending=None if self.follower.channel is None else self.follower.channel.lending,
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(
            inference, self._server.grpc_server
        )
        weights_pb2_grpc.add_WeightServiceServicer_to_server(
            WeightServicer(self.follower), self._server.grpc_server
        )
        await self._server.start()

    async def run_until(self, stop: asyncio.Event) -> None:
        """Follow versions until the stop event.

        Raises:
            UnavailableError: the engine cannot go on.
        """
        tasks = [
            asyncio.create_task(stop.wait(), name="stop"),
            asyncio.create_task(self.follower.follow(), name="follow-versions"),
            asyncio.create_task(self._show_readiness(), name="show-readiness"),
        ]
        engine = self.replica.options.engine
        # vLLM gives the copies of a data-parallel engine no table to change.
        if engine.speculative_tokens and engine.data_parallel == 1:
            guard = SpeculationGuard(engine=self.replica)
            tasks.append(asyncio.create_task(guard.watch(), name="watch-speculation"))
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        for task in done:
            task.result()

    async def stop(self) -> None:
        """Refuse new requests, let running ones end, close."""
        self.probes.ready = False
        role = self.run.spec.roles.inference
        # In a failed engine no request ends.
        grace_s = role.grace_s * 0.8 if role and not self.replica.failed else 0.0
        await asyncio.gather(self._server.stop(grace_s), self._http.stop(grace_s))

    async def _show_readiness(self) -> None:
        async for status in self.follower.watch():
            if status.is_ready != self.probes.ready:
                await self._server.set_ready(is_ready=status.is_ready)
                self.probes.ready = status.is_ready

    def _live_version(self) -> str | None:
        live = self.replica.live
        return None if live is None else str(live)
