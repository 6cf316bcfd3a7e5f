"""RewardService: scores groups over gRPC."""

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import grpc
from opentelemetry import trace
from opentelemetry.context import Context
from typing_extensions import override

from etude.common import telemetry
from etude.common.errors import InvalidFieldError
from etude.rewards import metrics
from etude.rewards.faults import Fault
from etude.rewards.functions.verifier import Grade
from etude.rewards.rubric import RewardValue
from etude.rewards.scoring import Scorer
from etude.v1 import rewards_pb2, rewards_pb2_grpc, rollout_pb2

MAX_ROLLOUTS = 1024
MAX_SCORE_S = 43_200.0
"""Longest scoring time, also for callers without a deadline; a lease lasts a day at most."""
ANSWER_SHARE = 0.9
"""Share of the caller's deadline for grading; the rest is for releasing leases and the answer."""

tracer = trace.get_tracer("etude.rewards")


@dataclass(slots=True)
class RewardService(rewards_pb2_grpc.RewardServiceServicer):
    """Scores groups with one rubric."""

    scorer: Scorer
    pools: Collection[str]

    @override
    async def Score(
        self,
        request: rewards_pb2.ScoreRequest,
        context: grpc.aio.ServicerContext[rewards_pb2.ScoreRequest, rewards_pb2.ScoreResponse],
    ) -> rewards_pb2.ScoreResponse:
        self._check(request)
        started = time.monotonic()
        left_s = min(context.time_remaining() or MAX_SCORE_S, MAX_SCORE_S)
        with (
            telemetry.continue_trace(context.invocation_metadata()),
            tracer.start_as_current_span("score", attributes=_attributes(request)),
        ):
            outcomes = await self.scorer.score(
                request.task_uri,
                request.pool,
                request.rollouts,
                deadline_s=started + ANSWER_SHARE * left_s,
            )
        metrics.REWARD_SECONDS.observe(time.monotonic() - started)
        record_parts(outcomes)
        for rollout, outcome in zip(request.rollouts, outcomes, strict=True):
            record_reward_span(rollout, outcome)
        return rewards_pb2.ScoreResponse(
            records=[
                record(rollout, outcome)
                for rollout, outcome in zip(request.rollouts, outcomes, strict=True)
            ],
            rubric_digest=self.scorer.rubric.digest(),
        )

    @override
    async def Describe(
        self,
        request: rewards_pb2.DescribeRequest,
        context: grpc.aio.ServicerContext[
            rewards_pb2.DescribeRequest, rewards_pb2.DescribeResponse
        ],
    ) -> rewards_pb2.DescribeResponse:
        rubric = self.scorer.rubric
        return rewards_pb2.DescribeResponse(
            functions=[
                rewards_pb2.RubricFunction(
                    name=entry.name,
                    function=entry.function,
                    version=entry.version,
                    weight=entry.weight,
                    parameters_json=entry.parameters_json(),
                )
                for entry in rubric.entries
            ],
            rubric_digest=rubric.digest(),
        )

    def _check(self, request: rewards_pb2.ScoreRequest) -> None:
        if not 1 <= len(request.rollouts) <= MAX_ROLLOUTS:
            raise InvalidFieldError("rollouts", f"give 1 to {MAX_ROLLOUTS} of one group")
        if not request.task_uri:
            raise InvalidFieldError("task_uri", "is empty")
        if request.pool not in self.pools:
            known = ", ".join(sorted(self.pools))
            raise InvalidFieldError("pool", f"{request.pool!r} is not a pool of this run: {known}")


def record(rollout: rollout_pb2.Rollout, outcome: RewardValue | Fault) -> rewards_pb2.RewardRecord:
    """A rollout's outcome as a message for the trainer."""
    if isinstance(outcome, Fault):
        metrics.REWARD_FAULTS.labels(kind=outcome.reason, blame="platform").inc()
        fault = rewards_pb2.RewardFault(reason=outcome.reason, message=outcome.message)
        return rewards_pb2.RewardRecord(rollout_id=rollout.rollout_id, fault=fault)
    success = outcome.success
    return rewards_pb2.RewardRecord(
        rollout_id=rollout.rollout_id,
        reward=outcome.reward,
        success=success,
        evidence=success.evidence if isinstance(success, Grade) else None,
        parts=[
            rewards_pb2.RewardPart(name=part.name, value=part.value, weight=part.weight)
            for part in outcome.parts
        ],
    )


def record_parts(outcomes: Sequence[RewardValue | Fault]) -> None:
    """Show the mean of each part over a group's rewards."""
    values: dict[str, list[float]] = {}
    for outcome in outcomes:
        for part in outcome.parts if isinstance(outcome, RewardValue) else ():
            values.setdefault(part.name, []).append(part.value)
    for name, found in values.items():
        metrics.REWARD_PART.labels(name=name).set(math.fsum(found) / len(found))


def _attributes(request: rewards_pb2.ScoreRequest) -> dict[str, str | int]:
    return {"etude.group.id": request.group_id, "etude.group.rollouts": len(request.rollouts)}


def record_reward_span(rollout: rollout_pb2.Rollout, outcome: RewardValue | Fault) -> None:
    """Add an outcome to the rollout's trace; a rollout without a trace gets none."""
    parent = _parent_context(rollout.trace_id, rollout.span_id)
    if parent is None:
        return
    attributes: dict[str, str | float] = {"etude.rollout.id": rollout.rollout_id}
    if isinstance(outcome, Fault):
        attributes["etude.reward.fault"] = outcome.reason
    else:
        attributes |= {"etude.reward": outcome.reward, "etude.reward.success": outcome.success}
        attributes |= {f"etude.reward.part.{part.name}": part.value for part in outcome.parts}
    tracer.start_span("reward", context=parent, attributes=attributes).end()


def _parent_context(trace_id: str, span_id: str) -> Context | None:
    try:
        numbers = int(trace_id, 16), int(span_id, 16)
    except ValueError:
        return None
    parent = trace.SpanContext(
        trace_id=numbers[0],
        span_id=numbers[1],
        is_remote=True,
        trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(parent)) if parent.is_valid else None
