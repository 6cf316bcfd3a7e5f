"""Records of turns for training, of users who consented."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

from blake3 import blake3

from etude.agent.completions import Completion
from etude.agent.transcript import asks_question
from etude.common.api_keys import KeyOwner
from etude.common.turn_log import TurnLog, identify_rollout
from etude.gateway import metrics
from etude.gateway.sealing_keys import SealingKeys
from etude.gateway.sessions import Branch
from etude.gateway.turn_request import RolloutMarks, TurnRequest
from etude.gateway.turn_text import TurnParts
from etude.v1 import inference_pb2, turns_pb2, weights_pb2

_ENDING_CHARS = 1_000
"""End of a turn's text in which a question is looked for: the search is not linear."""


class SampledTurn(NamedTuple):
    """A turn as it was sampled, with all that its record tells."""

    turn_id: str
    started_ns: int
    caller: KeyOwner
    request: TurnRequest
    marks: RolloutMarks
    arm: str
    experiment: str
    branch: Branch
    """Its tokens end with this turn's."""
    completion: Completion
    parts: TurnParts


@dataclass(slots=True)
class TurnRecorder:
    """Writes turns to the log; serving never waits for it."""

    log: TurnLog
    chat_template: str
    keys: SealingKeys | None
    """None: records are not encrypted."""

    def prepare(self, caller: KeyOwner) -> None:
        """Ask for what the record of a turn that begins needs."""
        if self.keys is not None and caller.consent:
            self.keys.request(caller)

    async def wait_prepared(self, caller: KeyOwner) -> None:
        """Wait a moment for what was asked for."""
        if self.keys is not None and caller.consent:
            await self.keys.wait(caller)

    def record(self, turn: SampledTurn) -> None:
        """Queue the record of a turn, if its user consents to it and to all that it repeats."""
        turn.branch.is_private |= not turn.caller.consent
        if turn.branch.is_private:
            metrics.RECORDED_TURNS.labels("no_consent").inc()
            return
        if self._append(turn):
            turn.branch.num_recorded = len(turn.branch.token_ids)
        else:
            # What follows is complete again, whatever is missing before it.
            turn.branch.num_recorded = 0
        metrics.WAITING_RECORD_BYTES.set(self.log.waiting_bytes)

    def _append(self, turn: SampledTurn) -> bool:
        sealer = None if self.keys is None else self.keys.find(turn.caller)
        if self.keys is not None and sealer is None:
            metrics.RECORDED_TURNS.labels("no_key").inc()
            return False
        record = make_record(turn, hash_config(self.chat_template, turn.request))
        if sealer is not None:
            sealer.seal(record)
        if not self.log.append(record):
            metrics.RECORDED_TURNS.labels("dropped").inc()
            return False
        return True

    def note_durable(self, count: int) -> None:
        """Count turns that became durable."""
        metrics.RECORDED_TURNS.labels("durable").inc(count)
        metrics.WAITING_RECORD_BYTES.set(self.log.waiting_bytes)


def make_record(turn: SampledTurn, config_hash: bytes) -> turns_pb2.TurnRecord:
    """Make the record of a turn."""
    branch, completion = turn.branch, turn.completion
    start, end = branch.num_recorded, len(branch.token_ids) - len(completion.token_ids)
    return turns_pb2.TurnRecord(
        turn_id=turn.turn_id,
        rollout_id=identify_rollout(turn.caller.tenant, turn.caller.user, branch.rollout),
        branch=branch.branch_id,
        parent_branch=branch.parent,
        compaction_of=branch.compaction_of,
        tenant=turn.caller.tenant,
        user=turn.caller.user,
        consent=turn.caller.consent,
        arm=turn.arm,
        experiment=turn.experiment,
        is_side=turn.marks.is_side,
        time_unix_nanos=turn.started_ns,
        config_hash=config_hash,
        num_prefix_tokens=start,
        prompt_token_ids=branch.token_ids[start:end],
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        spans=[
            weights_pb2.PolicySpan(
                sampled=span.sampled.to_proto(),
                context=span.context.to_proto(),
                start=span.start,
                end=span.end,
                replica=span.replica,
            )
            for span in completion.spans
        ],
        finish_reason=cast("inference_pb2.FinishReason", int(completion.finish)),
        temperature=turn.request.sampling.temperature,
        num_calls=max(len(turn.parts.calls), int(turn.parts.is_malformed)),
        num_broken_calls=int(turn.parts.is_malformed),
        asks_question=_asks_question(turn.parts),
    )


def _asks_question(parts: TurnParts) -> bool:
    is_call = parts.calls or parts.is_malformed
    return not is_call and asks_question(parts.content[-_ENDING_CHARS:])


def hash_config(chat_template: str, request: TurnRequest) -> bytes:
    """Hash what shapes the policy's behaviour, apart from its weights. 16 bytes."""
    system = [each.content for each in request.messages if each.role == "system"]
    config: Mapping[str, object] = {
        "template": chat_template,
        "system": system,
        "tools": request.tools,
        "mayCall": request.may_call,
        "temperature": request.sampling.temperature,
        "maxTokens": request.sampling.max_tokens,
    }
    return blake3(json.dumps(config, sort_keys=True).encode()).digest()[:16]
