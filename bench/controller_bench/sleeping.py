"""Rollout workers whose completions come from a real engine, and whose tools really sleep."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import grpc
from typing_extensions import override

from etude.agent.completions import Completion
from etude.common.rpc import channels
from etude.common.weights import VersionId
from etude.trainer.controller.run import Run
from etude.trainer.rollouts.engine_client import EngineSampler
from etude.trainer.rollouts.outage import OutageBudget
from etude.trainer.rollouts.protocol import GroupRequest, GroupResult, RolloutWorkers
from etude.trainer.routing.router import Router
from etude.trainer.routing.table import EngineState, RoutingTable
from etude.trainer.seeding import derive_seed
from etude.v1 import (
    environments_pb2,
    inference_pb2_grpc,
    journal_pb2,
    rewards_pb2,
    rollout_pb2,
    weights_pb2,
)

PROMPT_TOKENS, TURN_TOKENS, RESULT_TOKENS = 24, 24, 8
DEADLINE_S = 600.0


class ToolPlan(NamedTuple):
    """Turns of a rollout, and the time of the tool after each but the last."""

    turns: int
    median_s: float
    sigma: float
    """Of the logarithm."""


@dataclass(slots=True)
class _Conversation:
    """One context, token by token."""

    token_ids: list[int]
    loss_mask: list[bool]
    logprobs: list[float]
    spans: list[weights_pb2.PolicySpan] = field(default_factory=list)

    def add_turn(self, done: Completion, context: VersionId, sampled: VersionId) -> None:
        start = len(self.token_ids)
        self._extend(done.token_ids, done.logprobs, is_sampled=True)
        self.spans.append(
            weights_pb2.PolicySpan(
                sampled=sampled.to_proto(),
                context=context.to_proto(),
                start=start,
                end=len(self.token_ids),
                replica="engine-0",
            )
        )

    def add_result(self, token_ids: Sequence[int]) -> None:
        self._extend(token_ids, [0.0] * len(token_ids), is_sampled=False)

    def _extend(
        self, token_ids: Sequence[int], logprobs: Sequence[float], *, is_sampled: bool
    ) -> None:
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.loss_mask += [is_sampled] * len(token_ids)

    def link(self) -> rollout_pb2.Link:
        return rollout_pb2.Link(
            token_ids=self.token_ids,
            loss_mask=bytes(self.loss_mask),
            sampler_logprobs=self.logprobs,
            spans=self.spans,
        )


@dataclass(slots=True)
class SleepingRollouts(RolloutWorkers):
    """Samples each turn by the trainer's own client of engines."""

    target: str
    plan: ToolPlan
    runs: list[Run] = field(default_factory=list)
    _channel: grpc.aio.Channel | None = None
    _router: Router | None = None

    @override
    async def run(self, order: GroupRequest) -> GroupResult:
        if self._channel is None:
            self._channel = channels.dial(self.target)
            engines = ((self.target, EngineState.LIVE),)
            self._router = Router(table=RoutingTable(revision=1, engines=engines))
        found = await asyncio.gather(*(self._roll_out(order, index) for index in order.indices))
        return GroupResult(
            records=tuple(record.SerializeToString() for record in found),
            retried=0,
            driver="simulated",
            isolation=environments_pb2.ISOLATION_STRONG,
        )

    @property
    @override
    def num_workers(self) -> int:
        return 1

    @override
    async def update_routing(self, table: RoutingTable) -> None:
        pass

    async def close(self) -> None:
        """Close the connection to the engine."""
        if self._channel is not None:
            await self._channel.close()

    def _serving(self) -> VersionId:
        return self.runs[0].publishing.served or VersionId(0, 0)

    async def _roll_out(self, order: GroupRequest, index: int) -> journal_pb2.JournalRollout:
        draw = random.Random(derive_seed(order.seed, index))  # noqa: S311 - a plan by seed
        prompt = [random.Random(order.seed).randrange(256)] * PROMPT_TOKENS  # noqa: S311
        talk = _Conversation(prompt, [False] * PROMPT_TOKENS, [0.0] * PROMPT_TOKENS)
        sampler, oldest = self._sampler(order, index), self._serving()
        for turn in range(self.plan.turns):
            if turn:
                await asyncio.sleep(self.plan.median_s * draw.lognormvariate(0.0, self.plan.sigma))
                talk.add_result([draw.randrange(256) for _ in range(RESULT_TOKENS)])
            sampled = self._serving()
            done = await sampler.generate(
                talk.token_ids, max_tokens=TURN_TOKENS, temperature=1.0, seed=draw.getrandbits(31)
            )
            talk.add_turn(done, oldest, sampled)
        return _record(order, index, talk, oldest, self.plan, float(draw.random() < 0.5))

    def _sampler(self, order: GroupRequest, index: int) -> EngineSampler:
        assert self._channel is not None  # noqa: S101 - dialled by run()
        assert self._router is not None  # noqa: S101
        channel = self._channel
        return EngineSampler(
            engine_of=lambda _: inference_pb2_grpc.InferenceServiceStub(channel),
            router=self._router,
            group_id=order.group_id,
            rollout_id=order.rollout_id(index),
            end_ids=frozenset(),
            outage=OutageBudget(DEADLINE_S),
            timeout_s=DEADLINE_S,
        )


def _record(
    order: GroupRequest,
    index: int,
    talk: _Conversation,
    oldest: VersionId,
    plan: ToolPlan,
    reward: float,
) -> journal_pb2.JournalRollout:
    name = order.rollout_id(index)
    newest = talk.spans[-1].sampled
    return journal_pb2.JournalRollout(
        rollout=rollout_pb2.Rollout(
            rollout_id=name,
            group_id=order.group_id,
            task_id=order.task_id,
            index=index,
            seed=order.seed,
            links=[talk.link()],
            costs=rollout_pb2.Costs(turns=plan.turns, completion_tokens=sum(talk.loss_mask)),
            ending=rollout_pb2.ENDING_STOPPED,
            oldest=oldest.to_proto(),
            newest=newest,
        ),
        reward=rewards_pb2.RewardRecord(rollout_id=name, reward=reward, success=reward),
    )
