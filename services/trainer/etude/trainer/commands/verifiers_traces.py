"""Conversion of rollouts to traces of the verifiers package: graphs with tokens and logprobs.

A node is one message with the tokens that it adds; the path from root to leaf is one context, and
its tokens in order are exactly what the policy saw and sampled. Schema: `verifiers.v1.Trace`,
version 1, of verifiers 0.4.0 (https://pypi.org/project/verifiers/0.4.0/). Pure.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from etude.agent.chat import ChatFormat
from etude.agent.chat.pieces import Piece, PieceReader
from etude.agent.tool_formats.registry import find_tool_format
from etude.agent.tool_formats.xml import XmlFormat
from etude.common.weights import VersionId
from etude.v1 import journal_pb2, rewards_pb2, rollout_pb2

VERSION = 1
"""Of the schema."""
PACKAGE = "0.4.0"

_STOPS: Mapping[int, str] = {
    rollout_pb2.ENDING_UNSPECIFIED: "error",
    rollout_pb2.ENDING_STOPPED: "agent_completed",
    rollout_pb2.ENDING_LENGTH_LIMIT: "max_total_tokens",
    rollout_pb2.ENDING_TURN_LIMIT: "max_turns",
    rollout_pb2.ENDING_TIME_LIMIT: "agent_timeout",
    rollout_pb2.ENDING_POLICY_FAULT: "error",
    rollout_pb2.ENDING_PLATFORM_FAULT: "error",
    rollout_pb2.ENDING_CHANGE_TOO_LARGE: "change_too_large",
}
_FAULTS = frozenset(
    {
        rollout_pb2.ENDING_UNSPECIFIED,
        rollout_pb2.ENDING_POLICY_FAULT,
        rollout_pb2.ENDING_PLATFORM_FAULT,
    }
)

Json = dict[str, Any]


def trace(record: journal_pb2.JournalRollout, reader: PieceReader) -> Json:
    """Convert one rollout with its reward to a JSON value."""
    rollout, reward = record.rollout, record.reward
    graph = _Graph(reader.chat, reader, _calls(rollout.calls))
    for link in rollout.links:
        graph.add(link)
    is_fault = rollout.ending in _FAULTS or reward.HasField("fault")
    return {
        "version": VERSION,
        "id": rollout.rollout_id,
        "verifiers": {"version": PACKAGE},
        "task": {
            "type": "EtudeTask",
            "data": {"id": rollout.task_id, "name": rollout.task_id, **graph.opening()},
            "key": rollout.task_id,
        },
        "agent": {"config": {}, "name": "agent", "trainable": True},
        "nodes": graph.nodes,
        "calls": graph.exchanges,
        "rewards": _rewards(reward),
        "metrics": _metrics(rollout, reward),
        "info": {"etude": _origin(rollout)},
        "is_completed": True,
        "ok": not is_fault,
        "stop_condition": "error" if is_fault else _STOPS[rollout.ending],
        "is_timeout": rollout.ending == rollout_pb2.ENDING_TIME_LIMIT,
        "errors": list(_errors(rollout, reward)),
        "timing": _timing(rollout.costs),
    }


@dataclass(slots=True)
class _Graph:
    chat: ChatFormat
    reader: PieceReader
    calls: Mapping[int, list[Json]]
    """Tool calls by turn."""
    nodes: list[Json] = field(default_factory=list)
    exchanges: list[Json] = field(default_factory=list)
    _turn: int = 0
    _open: list[str] = field(default_factory=list)
    """Ids of calls without a result yet."""

    def add(self, link: rollout_pb2.Link) -> None:
        """Add one context as a path of its own."""
        parent: int | None = None
        seen = 0
        for piece, sampled in _pieces(link, self.reader):
            start, end = piece.start, piece.end
            tokens = list(link.token_ids[start:end])
            mask = [bool(byte) for byte in link.loss_mask[start:end]]
            logprobs = link.sampler_logprobs[start:end]
            # A token without a finite log-prob is not trained, and JSON has no NaN.
            trained = [m and math.isfinite(p) for m, p in zip(mask, logprobs, strict=True)]
            node: Json = {"parent": parent, "token_ids": tokens, "mask": trained, "timestamp": 0.0}
            if sampled:
                node |= {
                    "sampled": True,
                    "logprobs": list(itertools.compress(logprobs, trained)),
                    "message": self._answer(tokens, mask),
                }
                self._exchange(len(self.nodes), seen + mask.index(True), sum(mask), tokens)
            else:
                node["message"] = self._message(piece)
            parent = len(self.nodes)
            self.nodes.append(node)
            seen += len(tokens)

    def opening(self) -> Json:
        """System prompt and instruction of the task."""
        first = {n["message"]["role"]: n["message"]["content"] for n in reversed(self.nodes)}
        return {"prompt": first.get("user"), "system_prompt": first.get("system")}

    def _answer(self, tokens: Sequence[int], mask: Sequence[bool]) -> Json:
        sampled = [t for t, m in zip(tokens, mask, strict=True) if m]
        words = self.chat.decode(sampled[:-1] if sampled[-1] in self.chat.end_ids else sampled)
        calls = self.calls.get(self._turn, [])
        self._turn += 1
        self._open = [call["id"] for call in calls]
        if calls:
            words = _before_calls(self.chat, words)
        message: Json = {"role": "assistant", "content": words or None}
        return message | ({"tool_calls": calls} if calls else {})

    def _message(self, piece: Piece) -> Json:
        if piece.role == "tool":
            name = self._open.pop(0) if self._open else ""
            return {"role": "tool", "tool_call_id": name, "content": piece.text}
        role = "user" if piece.role == "assistant" else piece.role
        return {"role": role, "content": piece.text}

    def _exchange(self, node: int, prompt: int, sampled: int, tokens: Sequence[int]) -> None:
        has_calls = bool(self.calls.get(self._turn - 1))
        ended = "tool_calls" if has_calls else "stop"
        usage = {"prompt_tokens": prompt, "completion_tokens": sampled}
        finish = ended if tokens[-1] in self.chat.end_ids else "length"
        self.exchanges.append({"node": node, "finish_reason": finish, "usage": usage})


def _before_calls(chat: ChatFormat, text: str) -> str:
    """The text of a turn up to its first call, in the harness's format or the model's own."""
    native = find_tool_format(chat.template.source, chat.vocabulary.tags)
    for tool_format in (XmlFormat(), native):
        calls = tool_format.parse(text).calls if tool_format is not None else ()
        if calls:
            return text[: calls[0].start]
    return text


def _pieces(link: rollout_pb2.Link, reader: PieceReader) -> Iterator[tuple[Piece, bool]]:
    """Split a link into messages, and tell which ones the policy sampled.

    A sampled message begins with the frame that the harness wrote for it. A tool turn is one
    message for each of its results.
    """
    place = start = 0
    for sampled, run in itertools.groupby(link.loss_mask, key=bool):
        size = sum(1 for _ in run)
        if sampled:
            yield Piece("assistant", "", start, place + size), True
        else:
            ids = link.token_ids[place : place + size]
            pieces = reader.read_results(ids) if place else reader.read_opening(ids)
            is_last = place + size == len(link.loss_mask)
            for piece in pieces:
                moved = piece._replace(start=piece.start + place, end=piece.end + place)
                if piece.role != "assistant" or is_last:
                    yield moved, False
                start = moved.start if piece.role == "assistant" else moved.end
        place += size
        if sampled:
            start = place


def _calls(records: Sequence[rollout_pb2.CallRecord]) -> dict[int, list[Json]]:
    found: dict[int, list[Json]] = {}
    for record in records:
        calls = found.setdefault(record.turn, [])
        calls.append(
            {
                "id": f"{record.turn}.{len(calls)}",
                "name": record.name or "malformed",
                "arguments": record.arguments_json,
            }
        )
    return found


def _rewards(reward: rewards_pb2.RewardRecord) -> Json:
    if reward.HasField("fault"):
        return {}
    return {part.name: {"score": part.value, "weight": part.weight} for part in reward.parts}


def _metrics(rollout: rollout_pb2.Rollout, reward: rewards_pb2.RewardRecord) -> Json:
    costs = rollout.costs
    found: Json = {
        "turns": float(costs.turns),
        "tool_calls": float(costs.tool_calls),
        "malformed_calls": float(costs.malformed_calls),
        "completion_tokens": float(costs.completion_tokens),
        "tool_output_tokens": float(costs.tool_output_tokens),
    }
    return found | ({} if reward.HasField("fault") else {"success": reward.success})


def _origin(rollout: rollout_pb2.Rollout) -> Json:
    return {
        "group_id": rollout.group_id,
        "index": rollout.index,
        "seed": rollout.seed,
        "oldest": str(VersionId.from_proto(rollout.oldest)),
        "newest": str(VersionId.from_proto(rollout.newest)),
        "trace_id": rollout.trace_id,
    }


def _errors(rollout: rollout_pb2.Rollout, reward: rewards_pb2.RewardRecord) -> Iterator[Json]:
    if rollout.ending in _FAULTS:
        kind = rollout_pb2.Ending.Name(rollout.ending).removeprefix("ENDING_")
        yield {"type": kind, "message": rollout.fault}
    if reward.HasField("fault"):
        yield {"type": reward.fault.reason, "message": reward.fault.message}


def _timing(costs: rollout_pb2.Costs) -> Json:
    """Durations; the start time of a rollout is not recorded."""
    model = {"duration": costs.token_seconds}
    return {"start": 0.0, "agent": {"model": model, "harness": {"duration": costs.tool_seconds}}}
