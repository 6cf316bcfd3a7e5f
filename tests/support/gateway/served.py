"""A gateway over real HTTP, in front of engines over real gRPC that say what a test tells them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from typing_extensions import override

from etude.agent.chat import ChatFormat
from etude.common.api_keys import make_key
from etude.common.blobs import Store, open_store
from etude.common.http_server import HttpServer, http_config, open_listener
from etude.common.rpc.server import Server
from etude.common.turns.turn_log import read_turns
from etude.gateway.settings import Route, Settings
from etude.gateway.wiring import Parts, assemble
from etude.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    turns_pb2,
    weights_pb2,
    weights_pb2_grpc,
)

MODEL = "tiny"
OPENING = "<|assistant|>"
"""Token before each turn, in every template of these tests."""


@dataclass(slots=True)
class PlayedEngine(inference_pb2_grpc.InferenceServiceServicer):
    """Says a turn that depends on the prompt alone, so that any engine can go on with it."""

    chat: ChatFormat
    say: Callable[[str], str]
    """The next turn for the text of a prompt."""
    max_model_len: int = 4096
    aborts: int = 0
    """Calls that end after their first message."""
    holds: bool = False
    """Wait after the first message until the call is cancelled."""
    is_silent: bool = False
    """Describe nothing."""
    pause_s: float = 0.0
    """Before each message."""
    number: int = 3
    """Of the policy version."""
    run_uid: str = "run-1"
    lending: int = weights_pb2.LENDING_STATE_SERVING
    user_turns_peak: int = 0
    observed_s: float = 1e6
    loans: list[int] = field(default_factory=list)
    """Seconds of each; 0 for a recall."""
    requests: list[inference_pb2.GenerateRequest] = field(default_factory=list)
    is_cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    @override
    async def Generate(
        self,
        request: inference_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[
            inference_pb2.GenerateRequest, inference_pb2.GenerateResponse
        ],
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        if self.lending != weights_pb2.LENDING_STATE_SERVING:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "lent")
        self.requests.append(request)
        ids = self._continue([*request.prompt_token_ids])[: request.sampling.max_tokens]
        size = request.message_tokens or len(ids)
        version = weights_pb2.PolicyVersion(epoch=1, number=self.number)
        for start in range(0, len(ids), size):
            end = min(start + size, len(ids))
            message = inference_pb2.GenerateResponse(
                token_ids=ids[start:end],
                logprobs=[-0.25] * (end - start),
                spans=[weights_pb2.PolicySpan(sampled=version, context=version, end=end)],
                run_uid="" if start else self.run_uid,
            )
            if end == len(ids):
                is_end = ids[-1] in self.chat.end_ids
                message.finish_reason = (
                    inference_pb2.FINISH_REASON_STOP
                    if is_end
                    else inference_pb2.FINISH_REASON_LENGTH
                )
            await asyncio.sleep(self.pause_s)
            yield message
            if self.holds:
                try:
                    await asyncio.Event().wait()
                finally:
                    self.is_cancelled.set()
            if self.aborts and end < len(ids):
                self.aborts -= 1
                yield inference_pb2.GenerateResponse(
                    finish_reason=inference_pb2.FINISH_REASON_ABORT
                )
                return

    @override
    async def GetEngineLoad(
        self,
        request: inference_pb2.GetEngineLoadRequest,
        context: grpc.aio.ServicerContext[
            inference_pb2.GetEngineLoadRequest, inference_pb2.GetEngineLoadResponse
        ],
    ) -> inference_pb2.GetEngineLoadResponse:
        return inference_pb2.GetEngineLoadResponse()

    @override
    async def GetEngineInfo(
        self,
        request: inference_pb2.GetEngineInfoRequest,
        context: grpc.aio.ServicerContext[
            inference_pb2.GetEngineInfoRequest, inference_pb2.GetEngineInfoResponse
        ],
    ) -> inference_pb2.GetEngineInfoResponse:
        if self.is_silent:
            await asyncio.Event().wait()
        return inference_pb2.GetEngineInfoResponse(max_model_len=self.max_model_len)

    def _continue(self, prompt: Sequence[int]) -> list[int]:
        """The rest of the turn that the prompt leaves open."""
        opening = self.chat.vocabulary.token_id(OPENING)
        assert opening is not None
        if opening not in prompt:
            return self.chat.completion(self.say(self.chat.decode(prompt)))
        start = len(prompt) - [*reversed(prompt)].index(opening)
        turn = self.chat.completion(self.say(self.chat.decode(prompt[:start])))
        spoken = prompt[start:]
        assert turn[: len(spoken)] == spoken
        return turn[len(spoken) :]


@dataclass(slots=True)
class PlayedWeights(weights_pb2_grpc.WeightServiceServicer):
    """Reports the version and the load of an engine, and lends it."""

    engine: PlayedEngine

    @override
    async def GetWeightStatus(
        self,
        request: weights_pb2.GetWeightStatusRequest,
        context: grpc.aio.ServicerContext[
            weights_pb2.GetWeightStatusRequest, weights_pb2.GetWeightStatusResponse
        ],
    ) -> weights_pb2.GetWeightStatusResponse:
        return weights_pb2.GetWeightStatusResponse(status=self._status())

    @override
    async def SetLending(
        self,
        request: weights_pb2.SetLendingRequest,
        context: grpc.aio.ServicerContext[
            weights_pb2.SetLendingRequest, weights_pb2.SetLendingResponse
        ],
    ) -> weights_pb2.SetLendingResponse:
        self.engine.loans.append(request.seconds)
        self.engine.lending = (
            weights_pb2.LENDING_STATE_LENT
            if request.seconds
            else weights_pb2.LENDING_STATE_RETURNING
        )
        return weights_pb2.SetLendingResponse(status=self._status())

    def _status(self) -> weights_pb2.WeightStatus:
        return weights_pb2.WeightStatus(
            live=weights_pb2.PolicyVersion(epoch=1, number=self.engine.number),
            lending=self.engine.lending,  # type: ignore[arg-type]  # a number of the enum
            user_turns_peak=self.engine.user_turns_peak,
            observed_seconds=self.engine.observed_s,
        )


@dataclass(slots=True)
class ServedGateway:
    """A gateway that listens."""

    url: str
    key: str
    """Of alice, who consents."""
    keys_file: Path
    parts: Parts
    store: Store
    keys: Mapping[str, str] = field(default_factory=dict)
    """Of each further user."""
    engines: list[PlayedEngine] = field(default_factory=list)
    servers: list[Server] = field(default_factory=list)
    """Of the engines."""

    async def records(self) -> list[turns_pb2.TurnRecord]:
        """All records, once they are durable."""
        log = self.parts.log
        recorder = self.parts.app.service.recorder
        assert log is not None
        assert recorder is not None
        await recorder.finish()
        while log.waiting_bytes:  # noqa: ASYNC110 - the log tells no test
            await asyncio.sleep(0.01)
        return [*read_turns(self.store)]


def make_settings(folder: Path, **values: object) -> Settings:
    """Settings of a gateway on a free port."""
    given: dict[str, object] = {
        "route_file": folder / "route.json",
        "keys_file": folder / "keys",
        "scratch": folder / "scratch",
        "host": "127.0.0.1",
        "port": 0,
        "probe_port": 0,
        "tls_folder": None,
        "processes": 1,
        "max_body_mib": 1,
        "max_session_tokens": 100_000,
        "max_waiting_mib": 4,
        "outage_s": 10,
        "turn_s": 60,
        "traces_file": None,
    }
    return Settings(**{**given, **values})  # type: ignore[arg-type] # by name


@contextlib.asynccontextmanager
async def serve_route(
    folder: Path,
    chat: ChatFormat,
    targets: Sequence[str],
    route: Mapping[str, object],
    *,
    users: Sequence[str] = (),
    **values: object,
) -> AsyncIterator[ServedGateway]:
    """Serve what engines at some targets say; values are of settings."""
    made = {user: make_key(user, "serve") for user in ("alice", *users)}
    settings = make_settings(folder, **values)
    lines = [f"{line} tenant=acme consent=v1\n" for _, line in made.values()]
    settings.keys_file.write_text("".join(lines))
    keys = {user: key for user, (key, _) in made.items()}
    uri = (folder / "store").as_uri()
    described = Route.parse_known_fields(
        {
            "model": MODEL,
            "modelUri": chat.vocabulary.folder.as_uri(),
            "stable": targets,
            "storage": {"uri": uri},
            "recordUnencrypted": True,
            **route,
        }
    )
    parts = assemble(described, settings, chat)
    assert parts.log is not None
    with open_listener(settings.host, settings.port) as listener:
        server = HttpServer(http_config(parts.app))
        http = asyncio.create_task(server.serve(sockets=[listener]))
        writing = asyncio.create_task(parts.log.run())
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            yield ServedGateway(
                url, keys["alice"], settings.keys_file, parts, open_store(uri), keys=keys
            )
        finally:  # else a test that fails hangs at the end of its loop
            server.should_exit = True
            await http
            assert parts.app.service.recorder is not None
            await parts.app.service.recorder.finish()
            parts.log.close()
            await writing
            for connection in parts.connections:
                await connection.close()


async def start_engine(engine: PlayedEngine) -> Server:
    """Let an engine listen on a free port."""
    server = Server([])
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(engine, server.grpc_server)
    weights = PlayedWeights(engine)  # type: ignore[abstract]  # nothing else is asked for
    weights_pb2_grpc.add_WeightServiceServicer_to_server(weights, server.grpc_server)
    await server.start()
    return server


@contextlib.asynccontextmanager
async def serve_gateway(
    folder: Path,
    engines: Sequence[PlayedEngine],
    route: Mapping[str, object],
    *,
    outage_s: int = 10,
) -> AsyncIterator[ServedGateway]:
    """Serve the engines' policy; the first one's chat format is the gateway's."""
    async with contextlib.AsyncExitStack() as stopping:
        servers = []
        for engine in engines:
            servers.append(await start_engine(engine))
            # Also after a body that fails: an engine that listens on keeps its test from ending.
            stopping.push_async_callback(servers[-1].stop, 0)
        targets = [f"127.0.0.1:{server.port}" for server in servers]
        async with serve_route(
            folder, engines[0].chat, targets, route, outage_s=outage_s
        ) as served:
            served.engines, served.servers = [*engines], servers
            yield served
