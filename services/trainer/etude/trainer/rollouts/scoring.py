"""Reward client: scores finished groups; an unscored rollout is masked, never zero."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from etude.common.rpc.channels import MAX_MESSAGE_BYTES
from etude.trainer.rollouts.protocol import GroupRequest
from etude.v1 import journal_pb2, rewards_pb2, rewards_pb2_grpc, rollout_pb2

log = logging.getLogger(__name__)

RETRY_S = 1.0

_MAX_REQUEST_BYTES = MAX_MESSAGE_BYTES // 2
"""Larger groups are scored one rollout at a time."""

_MAX_ROLLOUT_BYTES = MAX_MESSAGE_BYTES - (64 << 10)
"""A larger rollout is scored without its calls, of which the costs hold the counts."""


@dataclass(slots=True)
class Scorer:
    """Client of the reward service."""

    rewards: "rewards_pb2_grpc.RewardServiceAsyncStub"
    timeout_s: float
    outage_s: float
    """Longest wait for a service that does not answer."""

    async def score(
        self, order: GroupRequest, rollouts: Sequence[rollout_pb2.Rollout]
    ) -> list[journal_pb2.JournalRollout]:
        """Score rollouts, in their order; each record has a reward, or a fault that masks it."""
        records = {r.rollout_id: _mask_record(r) for r in rollouts if _is_fault(r)}
        pending = [r for r in rollouts if not _is_fault(r)]
        for _ in range(order.limits.retries + 1):
            if not pending:
                break
            for record in await self._score_batch(order, pending):
                records[record.rollout_id] = record
            pending = [r for r in pending if not _has_reward(records.get(r.rollout_id))]
        for rollout in rollouts:
            rollout.ClearField("diff")  # only scoring reads it, and it would fill the journal
            rollout.ClearField("snapshot_id")
            for step in rollout.steps:
                step.ClearField("diff")
        return [
            journal_pb2.JournalRollout(rollout=rollout, reward=records[rollout.rollout_id])
            for rollout in rollouts
        ]

    async def _score_batch(
        self, order: GroupRequest, rollouts: Sequence[rollout_pb2.Rollout]
    ) -> list[rewards_pb2.RewardRecord]:
        """Score one batch; one record per rollout in any case."""
        request = _score_request(order, rollouts)
        if request.ByteSize() > _MAX_REQUEST_BYTES and len(rollouts) > 1:
            return [r for rollout in rollouts for r in await self._score_batch(order, [rollout])]
        if request.ByteSize() > _MAX_ROLLOUT_BYTES:
            for rollout in request.rollouts:
                rollout.ClearField("calls")
        try:
            answer = await self._call_with_retry(request)
        except grpc.aio.AioRpcError as error:
            log.warning("group %s was not scored: %s", order.group_id, error.details())
            return [_fault(r, "ScoringFailed", error.details() or "") for r in rollouts]
        known = {record.rollout_id: record for record in answer.records}
        missing = "the reward service left it out"
        return [known.get(r.rollout_id) or _fault(r, "ScoringFailed", missing) for r in rollouts]

    async def _call_with_retry(
        self, request: rewards_pb2.ScoreRequest
    ) -> rewards_pb2.ScoreResponse:
        waited_s = 0.0
        while True:
            try:
                return await self.rewards.Score(request, timeout=self.timeout_s)
            except grpc.aio.AioRpcError as error:
                is_away = error.code() is grpc.StatusCode.UNAVAILABLE
                if not is_away or waited_s > self.outage_s:
                    raise
                await asyncio.sleep(RETRY_S)
                waited_s += RETRY_S


def mask_rollout(
    record: journal_pb2.JournalRollout, what: str, *, reason: str = "InvalidRollout"
) -> None:
    """Mask a rollout with a platform fault."""
    log.error("rollout %s is unusable: %s", record.rollout.rollout_id, what)
    record.rollout.ending = rollout_pb2.ENDING_PLATFORM_FAULT
    record.rollout.fault = what
    fault = rewards_pb2.RewardFault(reason=reason, message=what)
    record.reward.fault.CopyFrom(fault)


def _score_request(
    order: GroupRequest, rollouts: Sequence[rollout_pb2.Rollout]
) -> rewards_pb2.ScoreRequest:
    request = rewards_pb2.ScoreRequest(
        group_id=order.group_id,
        task_uri=order.task_uri,
        pool=order.environment,
        rollouts=rollouts,
    )
    for rollout in request.rollouts:
        rollout.ClearField("links")  # scoring does not read tokens
    return request


def _is_fault(rollout: rollout_pb2.Rollout) -> bool:
    return rollout.ending == rollout_pb2.ENDING_PLATFORM_FAULT


def _has_reward(record: rewards_pb2.RewardRecord | None) -> bool:
    return record is not None and record.WhichOneof("result") == "reward"


def _mask_record(rollout: rollout_pb2.Rollout) -> rewards_pb2.RewardRecord:
    return _fault(rollout, "PlatformFault", rollout.fault)


def _fault(rollout: rollout_pb2.Rollout, reason: str, message: str) -> rewards_pb2.RewardRecord:
    fault = rewards_pb2.RewardFault(reason=reason, message=message)
    return rewards_pb2.RewardRecord(rollout_id=rollout.rollout_id, fault=fault)
