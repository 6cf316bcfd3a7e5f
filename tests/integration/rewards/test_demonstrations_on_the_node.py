"""Demonstrators at work on a real node: the same bytes as in memory, and the reward they expect."""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from etude.agent.tool_calls import MalformedCall, ParsedCall
from etude.common.rpc import channels
from etude.demo import demonstrations, intentions
from etude.v1 import (
    environments_pb2,
    environments_pb2_grpc,
    rewards_pb2,
    rewards_pb2_grpc,
    rollout_pb2,
)

if TYPE_CHECKING:  # the stubs know async classes that the generated modules lack
    Broker = environments_pb2_grpc.EnvBrokerServiceAsyncStub
    Node = environments_pb2_grpc.EnvNodeServiceAsyncStub

DEADLINE_S = 60.0


@dataclass
class Leased:
    """One environment of the pool, with the agent's tools."""

    node: "Node"
    lease: environments_pb2.Lease
    num_calls: int = 0

    async def execute(self, requested: Sequence[ParsedCall | MalformedCall]) -> list[str]:
        calls = []
        for call in requested:
            assert isinstance(call, ParsedCall)
            self.num_calls += 1
            calls.append(
                environments_pb2.ToolCall(
                    call_id=str(self.num_calls),
                    name=call.name,
                    arguments_json=json.dumps(dict(call.arguments)),
                )
            )
        request = environments_pb2.RunTurnRequest(
            lease_id=self.lease.lease_id, agent_token=self.lease.agent_token, calls=calls
        )
        answer = await self.node.RunTurn(request, timeout=DEADLINE_S)
        return [result.content.decode() for result in answer.results]

    async def diff(self) -> bytes:
        request = environments_pb2.DiffRequest(
            lease_id=self.lease.lease_id, control_token=self.lease.control_token
        )
        return b"".join(
            [piece.chunk async for piece in self.node.Diff(request, timeout=DEADLINE_S)]
        )


@pytest.fixture
async def leases(stack: Any) -> AsyncIterator[list[Leased]]:
    """One environment for each of the first six tasks."""
    found = []
    async with channels.dial(stack.broker.target) as to_broker:
        broker = environments_pb2_grpc.EnvBrokerServiceStub(to_broker)
        to_node = channels.dial(stack.node.target)
        for index, folder in enumerate(stack.tasks[:6]):
            request = environments_pb2.LaunchBatchRequest(
                run_id="test",
                idempotency_key=f"demonstration-{index}",
                template="python",
                workspace=environments_pb2.WorkspaceSource(uri=f"{folder.as_uri()}/environment"),
                count=1,
                toolset="Compact",
                ttl_seconds=60,
                queue_timeout_seconds=30,
            )
            async for answer in broker.LaunchBatch(request, timeout=DEADLINE_S):
                assert answer.HasField("lease"), answer.failure
                node = environments_pb2_grpc.EnvNodeServiceStub(to_node)
                found.append(Leased(node, answer.lease))
        yield found
        await broker.ReleaseLeases(
            environments_pb2.ReleaseLeasesRequest(lease_ids=[f.lease.lease_id for f in found]),
            timeout=DEADLINE_S,
        )
        await to_node.close()


async def test_the_transcript_is_the_same_and_the_reward_is_what_was_expected(
    stack: Any, leases: list[Leased]
) -> None:
    outcomes = set()
    async with channels.dial(stack.rewards.target) as channel:
        rewards = rewards_pb2_grpc.RewardServiceStub(channel)
        for index, leased in enumerate(leases):
            problem = stack.problems[index]
            # Seeds of which some repair and some do not.
            expected = await demonstrations.demonstrate(problem, Random(f"node/{index}"))
            intention = intentions.draw(problem, Random(f"node/{index}"))
            messages = await demonstrations.follow(intention, problem, leased.execute)
            assert tuple(messages) == expected.messages
            rollout = rollout_pb2.Rollout(
                rollout_id="a", ending=rollout_pb2.ENDING_STOPPED, diff=await leased.diff()
            )
            request = rewards_pb2.ScoreRequest(
                task_uri=stack.tasks[index].as_uri(), pool="repos", rollouts=[rollout]
            )
            answer = await rewards.Score(request, timeout=DEADLINE_S)
            assert answer.records[0].success == float(expected.is_solved)
            outcomes.add(expected.is_solved)
    assert outcomes == {True, False}, "otherwise this test shows half of what it should"
