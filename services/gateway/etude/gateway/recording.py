"""Records of turns for training, of users who consented."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from blake3 import blake3

from etude.agent.chat import ChatFormat
from etude.agent.completions import Completion
from etude.agent.transcript import asks_question
from etude.common.api_keys import KeyOwner
from etude.common.redact.redactor import find_secrets
from etude.common.turns.turn_log import TurnLog, identify_rollout
from etude.gateway import metrics
from etude.gateway.sealing_keys import SealingKeys
from etude.gateway.sessions import Branch
from etude.gateway.turn_request import RolloutMarks, TurnRequest
from etude.gateway.turn_text import TurnParts
from etude.v1 import inference_pb2, turns_pb2, weights_pb2

_ENDING_CHARS = 1_000
"""End of a turn's text in which a question is looked for: the search is not linear."""
_OVERLAP_TOKENS = 128
"""Clean tokens that are searched again with what follows: a secret may begin in them."""
_THREAD_TOKENS = 4_000
"""Longer texts are searched in a thread, beside other requests: they take over 1 ms."""


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
    num_tokens: int
    """Of the branch, up to the end of this turn."""
    completion: Completion
    run_uid: str
    """Of the versions that sampled it."""
    parts: TurnParts


@dataclass(slots=True)
class TurnRecorder:
    """Writes turns to the log; serving never waits for it. Belongs to the event loop."""

    log: TurnLog
    chat: ChatFormat
    keys: SealingKeys | None
    """None: records are not encrypted."""
    _recording: "set[asyncio.Task[None]]" = field(default_factory=set)
    """A turn each, whose client may be gone."""

    def prepare(self, caller: KeyOwner) -> None:
        """Ask for what the record of a turn that begins needs."""
        if self.keys is not None and caller.consent:
            self.keys.request(caller)

    def record(self, turn: SampledTurn) -> None:
        """Begin to record a turn, if its user consents to it and to all that it repeats."""
        turn.branch.is_private |= not turn.caller.consent
        if turn.branch.is_private:
            metrics.RECORDED_TURNS.labels("no_consent").inc()
            return
        task = asyncio.create_task(self._record(turn))
        self._recording.add(task)
        task.add_done_callback(self._recording.discard)

    async def finish(self) -> None:
        """Wait until all turns are in the log."""
        while self._recording:
            await asyncio.wait(self._recording)

    async def _record(self, turn: SampledTurn) -> None:
        async with turn.branch.recording:
            if self.keys is not None:
                await self.keys.wait(turn.caller)
            await self._find_secrets(turn)
            # What follows a lost record is complete again, whatever is missing before it.
            turn.branch.num_recorded = turn.num_tokens if self._append(turn) else 0
        metrics.WAITING_RECORD_BYTES.set(self.log.waiting_bytes)

    async def _find_secrets(self, turn: SampledTurn) -> None:
        """Search what the turn adds to its branch."""
        branch = turn.branch
        if branch.withheld_rules:
            return
        start = max(0, branch.num_clean - _OVERLAP_TOKENS)
        token_ids = branch.token_ids[start : turn.num_tokens].tolist()
        if len(token_ids) > _THREAD_TOKENS:
            branch.withheld_rules = await asyncio.to_thread(find_rules, self.chat, token_ids)
        else:
            branch.withheld_rules = find_rules(self.chat, token_ids)
        if not branch.withheld_rules:
            branch.num_clean = turn.num_tokens

    def _append(self, turn: SampledTurn) -> bool:
        sealer = None if self.keys is None else self.keys.find(turn.caller)
        if self.keys is not None and sealer is None:
            metrics.RECORDED_TURNS.labels("no_key").inc()
            return False
        record = make_record(turn, hash_config(self.chat.template.source, turn.request))
        if turn.branch.withheld_rules:
            withhold_tokens(record, turn.branch.withheld_rules)
        if sealer is not None:
            sealer.seal(record)
        if not self.log.append(record):
            metrics.RECORDED_TURNS.labels("dropped").inc()
            return False
        for rule in turn.branch.withheld_rules:
            metrics.WITHHELD_TURNS.labels(rule).inc()
        return True

    def note_durable(self, count: int) -> None:
        """Count turns that became durable."""
        metrics.RECORDED_TURNS.labels("durable").inc(count)
        metrics.WAITING_RECORD_BYTES.set(self.log.waiting_bytes)


def find_rules(chat: ChatFormat, token_ids: Sequence[int]) -> tuple[str, ...]:
    """Names of the redaction rules that find something in the text of tokens."""
    found = find_secrets(chat.decode(token_ids).encode())
    return tuple(sorted({each.rule.name for each in found}))


def withhold_tokens(record: turns_pb2.TurnRecord, rules: Sequence[str]) -> None:
    """Remove the tokens of a record: others in their place would not be what the policy read."""
    record.withheld.rules.extend(rules)
    record.withheld.num_tokens = len(record.token_ids)
    for name in ("prompt_token_ids", "token_ids", "logprobs"):
        record.ClearField(name)


def make_record(turn: SampledTurn, config_hash: bytes) -> turns_pb2.TurnRecord:
    """Make the record of a turn."""
    branch, completion = turn.branch, turn.completion
    start, end = branch.num_recorded, turn.num_tokens - len(completion.token_ids)
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
        run_uid=turn.run_uid,
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
