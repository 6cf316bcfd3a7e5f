"""The partners of a rollout worker over real gRPC: scripted, and faulty on demand."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from tests.support.trainer.scripted_engine import Engine, Weights
from tests.support.trainer.scripted_environments import Broker, Node
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from typing_extensions import override

from etude.agent.chat import CHAT_TEMPLATE, LAYOUT_TOKENS, ChatFormat
from etude.common.api.storage import Storage
from etude.common.rpc.server import Server
from etude.trainer.rollouts.protocol import WorkerConfig
from etude.trainer.rollouts.worker import RolloutWorker
from etude.v1 import (
    environment_state_pb2,
    environment_state_pb2_grpc,
    environments_pb2_grpc,
    inference_pb2_grpc,
    rewards_pb2,
    rewards_pb2_grpc,
    weights_pb2_grpc,
)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A byte-level tokenizer with the layout's tokens."""
    alphabet = {byte: i for i, byte in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in LAYOUT_TOKENS])
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


@dataclass(slots=True)
class Rewards(rewards_pb2_grpc.RewardServiceServicer):
    """Gives siblings their rewards in turn; faults at first if told so."""

    values: Sequence[float] = (1.0,)
    faults: int = 0
    """Rollouts that cannot be scored before any can."""
    requests: list[rewards_pb2.ScoreRequest] = field(default_factory=list)

    @override
    async def Score(
        self,
        request: rewards_pb2.ScoreRequest,
        context: grpc.aio.ServicerContext[rewards_pb2.ScoreRequest, rewards_pb2.ScoreResponse],
    ) -> rewards_pb2.ScoreResponse:
        self.requests.append(request)
        records = []
        for rollout in request.rollouts:
            value = self.values[rollout.index % len(self.values)]
            record = rewards_pb2.RewardRecord(
                rollout_id=rollout.rollout_id, reward=value, success=value
            )
            if self.faults:
                self.faults -= 1
                record.fault.CopyFrom(rewards_pb2.RewardFault(reason="INFRA", message="no slot"))
            records.append(record)
        return rewards_pb2.ScoreResponse(records=records)

    @override
    async def Describe(
        self,
        request: rewards_pb2.DescribeRequest,
        context: grpc.aio.ServicerContext[
            rewards_pb2.DescribeRequest, rewards_pb2.DescribeResponse
        ],
    ) -> rewards_pb2.DescribeResponse:
        return rewards_pb2.DescribeResponse()


@dataclass(slots=True)
class States(environment_state_pb2_grpc.EnvStateServiceServicer):
    """Sets up and saves every environment that it is asked to, or none."""

    can_save: bool = True
    saved: list[environment_state_pb2.SnapshotRequest] = field(default_factory=list)
    set_up: list[environment_state_pb2.SetUpRequest] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    failing_command: int | None = None
    """Command of every set-up that fails."""
    lost_setups: int = 0
    """Set-ups that end with UNAVAILABLE before any succeeds."""
    on_resume: Callable[[str], None] | None = None
    """Called with each lease that is resumed; None: none can be."""

    @override
    async def Resume(
        self,
        request: environment_state_pb2.ResumeRequest,
        context: grpc.aio.ServicerContext[
            environment_state_pb2.ResumeRequest, environment_state_pb2.ResumeResponse
        ],
    ) -> environment_state_pb2.ResumeResponse:
        if self.on_resume is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such lease")
        else:
            self.on_resume(request.lease_id)
        return environment_state_pb2.ResumeResponse()

    @override
    async def SetUp(
        self,
        request: environment_state_pb2.SetUpRequest,
        context: grpc.aio.ServicerContext[
            environment_state_pb2.SetUpRequest, environment_state_pb2.SetUpResponse
        ],
    ) -> environment_state_pb2.SetUpResponse:
        self.set_up.append(request)
        if self.lost_setups:
            self.lost_setups -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the node is gone")
        if self.failing_command is not None:
            return environment_state_pb2.SetUpResponse(
                succeeded=self.failing_command, exit_code=3, output=b"no such package"
            )
        return environment_state_pb2.SetUpResponse(succeeded=len(request.commands))

    @override
    async def DropSnapshots(
        self,
        request: environment_state_pb2.DropSnapshotsRequest,
        context: grpc.aio.ServicerContext[
            environment_state_pb2.DropSnapshotsRequest,
            environment_state_pb2.DropSnapshotsResponse,
        ],
    ) -> environment_state_pb2.DropSnapshotsResponse:
        self.dropped += request.snapshot_ids
        return environment_state_pb2.DropSnapshotsResponse()

    @override
    async def Snapshot(
        self,
        request: environment_state_pb2.SnapshotRequest,
        context: grpc.aio.ServicerContext[
            environment_state_pb2.SnapshotRequest, environment_state_pb2.SnapshotResponse
        ],
    ) -> environment_state_pb2.SnapshotResponse:
        if not self.can_save:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no cap 'memory'")
        self.saved.append(request)
        return environment_state_pb2.SnapshotResponse(snapshot_id=request.snapshot_id)


@dataclass(slots=True)
class Partners:
    """All of them behind one port."""

    engine: Engine
    broker: Broker
    node: Node
    rewards: Rewards
    states: States
    weights: Weights
    target: str = ""


@pytest.fixture
async def partners(model_folder: Path) -> AsyncIterator[Partners]:
    """A world for one rollout worker."""
    engine = Engine(ChatFormat.load(model_folder))
    made = Partners(engine, Broker(), Node(), Rewards(), States(), Weights(engine))  # type: ignore[abstract] # the other calls never come
    server = Server(["scripted"])
    grpc_server = server.grpc_server
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(made.engine, grpc_server)
    weights_pb2_grpc.add_WeightServiceServicer_to_server(made.weights, grpc_server)
    environments_pb2_grpc.add_EnvBrokerServiceServicer_to_server(made.broker, grpc_server)
    environments_pb2_grpc.add_EnvNodeServiceServicer_to_server(made.node, grpc_server)
    environment_state_pb2_grpc.add_EnvStateServiceServicer_to_server(made.states, grpc_server)
    rewards_pb2_grpc.add_RewardServiceServicer_to_server(made.rewards, grpc_server)
    await server.start()
    made.target = made.broker.endpoint = f"127.0.0.1:{server.port}"
    yield made
    await server.stop(0.1)


@pytest.fixture
async def worker(
    partners: Partners, model_folder: Path, tmp_path: Path
) -> AsyncIterator[RolloutWorker]:
    made = RolloutWorker(
        WorkerConfig(
            run="run",
            model_folder=model_folder,
            brokers={"repos": partners.target},
            templates={"repos": "python"},
            rewards_target=partners.target,
            score_timeout_s=30,
            storage=Storage(uri=f"file://{tmp_path}/run"),
            outage_s=5,
        )
    )
    yield made
    await made.close()
