"""Assembly of the gateway's parts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from etude.agent.chat import ChatFormat
from etude.agent.chat.trial import check_chat_format
from etude.common.api_keys import ApiKeyFile
from etude.common.release.channels import CANARY, STABLE
from etude.common.rpc import channels
from etude.common.stores import WEIGHT_SUFFIXES, local_folder, open_run_store
from etude.common.turns.turn_log import TurnLog
from etude.gateway.app import GatewayApp
from etude.gateway.canary import CanaryWatch
from etude.gateway.lending import EngineLender
from etude.gateway.recording import TurnRecorder
from etude.gateway.sealing_keys import SealingKeys
from etude.gateway.sessions import Sessions
from etude.gateway.settings import Route, Settings
from etude.gateway.tool_forms import ToolForms
from etude.gateway.turns import TurnService
from etude.gateway.upstream import EngineFleet
from etude.v1 import inference_pb2_grpc, turns_pb2_grpc, weights_pb2_grpc

DEFAULT_LIMIT = 600
"""Requests a minute of a key without a limit of its own."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of one gateway process."""

    app: GatewayApp
    log: TurnLog | None
    canary: CanaryWatch | None
    """None: the route decides which users have the canary."""
    lender: EngineLender | None
    """None: no engine is ever lent."""
    connections: Sequence[grpc.aio.Channel]


def load_chat_format(route: Route, scratch: Path) -> ChatFormat:
    """Load the chat format of a route's model, after a trial of it.

    Raises:
        UserError: the model cannot be used.
    """
    folder = local_folder(route.model_uri, scratch, route.model_access, leave_out=WEIGHT_SUFFIXES)
    check_chat_format(folder)
    return ChatFormat.load(folder)


def assemble(route: Route, settings: Settings, chat: ChatFormat) -> Parts:
    """Assemble the gateway of a route.

    Raises:
        UserError: the keys or the store cannot be used.
    """
    connections = {target: channels.dial(target) for target in (*route.stable, *route.canary)}
    stubs = {
        target: inference_pb2_grpc.InferenceServiceStub(connection)
        for target, connection in connections.items()
    }
    stub_of, outage_s, turn_s = stubs.__getitem__, settings.outage_s, settings.turn_s
    fleets = {
        STABLE: EngineFleet(route.stable, stub_of, outage_s, turn_s),
        CANARY: EngineFleet(route.canary, stub_of, outage_s, turn_s, standby=route.stable),
    }
    recorder = None
    if route.storage is not None:
        store = open_run_store(route.storage.uri, route.storage)
        keys = None
        if route.feedback is not None:
            connections[route.feedback] = channels.dial(route.feedback)
            stub = turns_pb2_grpc.TurnKeyServiceStub(connections[route.feedback])
            keys = SealingKeys(stub)
        recorder = TurnRecorder(TurnLog(store, settings.max_waiting_mib << 20), chat, keys)
        recorder.log.note_durable = recorder.note_durable
    canary = _watch_canary(route, connections)
    service = TurnService(
        chat, ToolForms(chat), Sessions(settings.max_session_tokens), recorder, fleets
    )
    app = GatewayApp(
        service=service,
        keys=ApiKeyFile.load(
            settings.keys_file, num_processes=settings.processes, default_limit=DEFAULT_LIMIT
        ),
        model=route.model,
        find_experiment=lambda: route.experiment if canary is None else canary.experiment,
        max_body_bytes=settings.max_body_mib << 20,
    )
    lender = _lender(route, connections, [*fleets.values()])
    return Parts(app, recorder.log if recorder else None, canary, lender, [*connections.values()])


def _lender(
    route: Route, connections: Mapping[str, grpc.aio.Channel], fleets: Sequence[EngineFleet]
) -> EngineLender | None:
    if route.lending is None:
        return None
    stubs = {
        target: weights_pb2_grpc.WeightServiceStub(connections[target]) for target in route.stable
    }
    return EngineLender(route.lending, stubs, fleets)


def _watch_canary(route: Route, connections: Mapping[str, grpc.aio.Channel]) -> CanaryWatch | None:
    if route.channels is None:
        return None
    engines = [weights_pb2_grpc.WeightServiceStub(connections[target]) for target in route.canary]
    return CanaryWatch(open_run_store(route.channels.uri, route.channels), engines)
