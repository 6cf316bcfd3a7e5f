"""Rows of finished rollouts for people: written by a rollout worker, which reads the tokens."""

import itertools
from collections.abc import Iterable
from typing import Any

from etude.agent.chat import ChatFormat
from etude.agent.chat.pieces import PieceReader
from etude.agent.toolsets import list_schemas
from etude.common.blobs import MissingError, Store
from etude.common.blobs.store import ShortReadError
from etude.common.errors import CorruptError
from etude.common.evaluation.rollout_metrics import edits_without_evidence, latency_s
from etude.common.run_folder.record import open_record
from etude.common.weights import VersionId
from etude.trainer.contents.measures import num_tokens
from etude.trainer.contents.objects import OF_EVALUATIONS, list_objects, restore_rollouts
from etude.v1 import environments_pb2, journal_pb2, rollout_pb2

Row = dict[str, Any]

UNREADABLE = "unreadable"
"""Field of a row without turns and calls: why they cannot be read."""


def write_readable_rollouts(
    store: Store, chat: ChatFormat | None, step: int, split: str, records: Iterable[bytes]
) -> None:
    """Write the rollouts of a step to the run's record; tokens of evaluations are deleted then.

    A rollout whose tokens or calls are gone or damaged has its figures and no turns. It is not
    written over a record that an earlier attempt made, which may have had them.

    Args:
        store: of the run.
        chat: format of conversations; None for rollouts of an endpoint.
        step: counted over all phases.
        split: train, or eval-<name>.
        records: JournalRollout messages, serialised.

    Raises:
        StoreError: the store does not answer.
    """
    parsed = [journal_pb2.JournalRollout.FromString(data) for data in records]
    reader = None if chat is None else PieceReader.of(chat, list_schemas())
    rows = [_stored_row(store, each, reader) for each in parsed]
    record, is_whole = open_record(store), not any(UNREADABLE in row for row in rows)
    if is_whole or not any(True for _ in record.rollouts(step, split)):
        record.write_rollouts(step, split, rows)
    keys = [found.key for each in parsed for found in list_objects(each.content)]
    store.delete([key for key in keys if key.startswith(OF_EVALUATIONS)])


def _stored_row(
    store: Store, record: journal_pb2.JournalRollout, reader: PieceReader | None
) -> Row:
    """Row of a rollout whose tokens and calls may be in the store.

    Raises:
        StoreError: the store does not answer.
    """
    try:
        [whole] = restore_rollouts(store, [record])
    except (MissingError, CorruptError, ShortReadError) as error:
        return _rollout_row(record, reader) | {UNREADABLE: str(error)}
    return _rollout_row(whole, reader)


def ending_name(rollout: rollout_pb2.Rollout) -> str:
    """Name of the ending of a rollout, in lower case."""
    return rollout_pb2.Ending.Name(rollout.ending).removeprefix("ENDING_").lower()


def rollout_rows(
    records: Iterable[journal_pb2.JournalRollout], chat: ChatFormat | None
) -> list[Row]:
    """Rows of rollouts for people: turns as text, reward and ending."""
    reader = None if chat is None else PieceReader.of(chat, list_schemas())
    return [_rollout_row(record, reader) for record in records]


def _rollout_row(record: journal_pb2.JournalRollout, reader: PieceReader | None) -> Row:
    rollout, reward = record.rollout, record.reward
    row: Row = {
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id,
        "task_id": rollout.task_id,
        "index": rollout.index,
        "ending": ending_name(rollout),
        "tokens": num_tokens(record),
        "read_tokens": rollout.costs.prompt_tokens + rollout.costs.tool_output_tokens,
        "sampled_tokens": rollout.costs.completion_tokens,
        "seconds": round(latency_s(rollout.costs), 3),
        "turns": turns(rollout, reader) if reader is not None else [],
        "calls": [
            {"turn": c.turn, "name": c.name, "is_error": c.is_error, "is_malformed": c.is_malformed}
            for c in rollout.calls
        ],
        "oldest": str(VersionId.from_proto(rollout.oldest)),
        "newest": str(VersionId.from_proto(rollout.newest)),
        "trace_id": rollout.trace_id,
    }
    if not record.content.HasField("calls"):
        row["edits_without_evidence"] = edits_without_evidence(rollout.calls)
    if rollout.steps:
        row["steps"] = [step.name for step in rollout.steps]
    if rollout.costs.turns and not rollout.links and not record.HasField("content"):
        _remove_tokens(row)
    if reward.WhichOneof("result") == "reward":
        row["reward"] = reward.reward
        row["success"] = reward.success
        row["evidence"] = _evidence(reward.evidence) if reward.HasField("evidence") else None
        row["parts"] = {part.name: part.value for part in reward.parts}
    else:
        row["fault"] = rollout.fault or f"{reward.fault.reason}: {reward.fault.message}"
    return row


def _remove_tokens(row: Row) -> None:
    """Remove the figures of tokens: an endpoint gives none, and not always their number."""
    for name in ("tokens", "read_tokens", "oldest", "newest"):
        del row[name]
    if not row["sampled_tokens"]:
        del row["sampled_tokens"]


def _evidence(found: environments_pb2.GradeEvidence) -> Row:
    """Evidence of a grade: a fork proves less than a fresh sandbox."""
    mode = environments_pb2.GradeMode.Name(found.mode).removeprefix("GRADE_MODE_")
    isolation = environments_pb2.Isolation.Name(found.isolation).removeprefix("ISOLATION_")
    return {"mode": mode.lower(), "driver": found.driver, "isolation": isolation.lower()}


def turns(rollout: rollout_pb2.Rollout, reader: PieceReader) -> list[Row]:
    """Transcript turn by turn. The mask, not the tags, delimits sampled turns.

    A policy that samples a role's tag therefore stays one assistant turn.
    """
    chat = reader.chat
    found: list[Row] = []
    for link in rollout.links:
        place = 0
        for sampled, run in itertools.groupby(link.loss_mask, key=bool):
            size = sum(1 for _ in run)
            ids = link.token_ids[place : place + size]
            if sampled:
                text = chat.decode(ids[:-1] if ids[-1] in chat.end_ids else ids)
                found.append(_turn("assistant", text))
            else:
                pieces = reader.read_results(ids) if place else reader.read_opening(ids)
                found += [_turn(piece.role, piece.text) for piece in pieces]
            place += size
    return [turn for turn in found if turn["text"]]


def _turn(role: str, text: str) -> Row:
    return {"role": role, "text": text}
