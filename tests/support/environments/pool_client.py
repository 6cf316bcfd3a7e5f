"""Clients of a pool, with the calls that tests make."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from etude.common.rpc import channels
from etude.v1 import (
    environment_state_pb2_grpc,
    environments_pb2,
    environments_pb2_grpc,
)

DEADLINE_S = 30
"""Generous: neighbours may hold both cores."""


@dataclass(slots=True)
class Pool:
    """Clients of one broker and its node, with the calls that tests make."""

    broker: "environments_pb2_grpc.EnvBrokerServiceAsyncStub"
    watch: "environments_pb2_grpc.PoolServiceAsyncStub"
    uri: str
    toolset: str = "Compact"
    deadline_s: float = DEADLINE_S
    _channels: dict[str, "environments_pb2_grpc.EnvNodeServiceAsyncStub"] = field(
        default_factory=dict
    )

    def request(
        self, key: str, count: int = 1, **fields: int
    ) -> environments_pb2.LaunchBatchRequest:
        made = environments_pb2.LaunchBatchRequest(
            run_id="run",
            idempotency_key=key,
            template="python",
            workspace=environments_pb2.WorkspaceSource(uri=self.uri),
            count=count,
            toolset=self.toolset,
        )
        for name, value in fields.items():
            setattr(made, name, value)
        return made

    async def launch(self, key: str, count: int = 1, **fields: int) -> list[environments_pb2.Lease]:
        call = self.broker.LaunchBatch(self.request(key, count, **fields), timeout=self.deadline_s)
        outcomes = [outcome async for outcome in call]
        assert all(outcome.HasField("lease") for outcome in outcomes), outcomes
        return [o.lease for o in sorted(outcomes, key=lambda o: o.index)]

    def node(
        self, lease: environments_pb2.Lease
    ) -> "environments_pb2_grpc.EnvNodeServiceAsyncStub":
        if lease.endpoint not in self._channels:
            channel = channels.dial(lease.endpoint)
            self._channels[lease.endpoint] = environments_pb2_grpc.EnvNodeServiceStub(channel)
        return self._channels[lease.endpoint]

    def states(
        self, lease: environments_pb2.Lease
    ) -> "environment_state_pb2_grpc.EnvStateServiceAsyncStub":
        return environment_state_pb2_grpc.EnvStateServiceStub(channels.dial(lease.endpoint))

    async def turn(
        self, lease: environments_pb2.Lease, *calls: tuple[str, str, Mapping[str, str]]
    ) -> list[str]:
        request = environments_pb2.RunTurnRequest(
            lease_id=lease.lease_id,
            agent_token=lease.agent_token,
            calls=[
                environments_pb2.ToolCall(
                    call_id=i, name=name, arguments_json=json.dumps(arguments)
                )
                for i, name, arguments in calls
            ],
        )
        answer = await self.node(lease).RunTurn(request, timeout=self.deadline_s)
        return [result.content.decode() for result in answer.results]

    async def diff(self, lease: environments_pb2.Lease) -> environments_pb2.WorkspaceDiff:
        request = environments_pb2.DiffRequest(
            lease_id=lease.lease_id, control_token=lease.control_token
        )
        chunks = [c.chunk async for c in self.node(lease).Diff(request, timeout=self.deadline_s)]
        return environments_pb2.WorkspaceDiff.FromString(b"".join(chunks))

    async def grade(
        self, lease: environments_pb2.Lease, job: environments_pb2.GradeJob
    ) -> environments_pb2.GradeResponse:
        requests = [
            environments_pb2.GradeRequest(
                lease_id=lease.lease_id, control_token=lease.control_token, chunk=chunk
            )
            for chunk in channels.chunks(job.SerializeToString())
        ]
        return await self.node(lease).Grade(iter(requests), timeout=self.deadline_s)
