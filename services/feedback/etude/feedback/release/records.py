"""Records of release decisions: create-only objects, of which the newest is the state.

    release/<number:012d>.json     ReleaseRecord; numbers from 1, without a gap
    evidence/<digest>.json         figures behind a decision, by the BLAKE3 of the object
    channels/<channel>/<n>.json    the records that a decision appends to channels, as it holds them

Evidence is created first, then the decision, which commits, then the channels' records. Killed in
between, the next service appends what the newest decision holds: the same bytes.
"""

from typing import Annotated, Literal

from blake3 import blake3
from pydantic import BaseModel, Field

from etude.common.blobs import Store
from etude.common.errors import CorruptError
from etude.common.release.channels import (
    CANARY,
    STABLE,
    ChannelExperiment,
    ChannelRecord,
    Sentence,
    ServedVersion,
)
from etude.common.weights.protocol import records
from etude.common.weights.protocol.versions import MAX_NUMBER
from etude.feedback.release.decision import ReleaseDecision
from etude.feedback.release.state import ReleaseState

RELEASES = "release/"
EVIDENCE = "evidence/"
MAX_REQUESTS = 128
"""Requests that are known again: the newest ones."""

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
RequestId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/+-]{0,127}$")]
Number = Annotated[int, Field(ge=1, le=MAX_NUMBER)]


class AnsweredRequest(BaseModel):
    """A request, and the decision that answered it."""

    model_config = records.STRICT

    id: RequestId
    digest: Digest
    """Of its content, so that an id is used once."""
    number: Number


class ReleaseRecord(BaseModel):
    """One decision with the state after it."""

    model_config = records.STRICT

    format: Literal[1] = 1
    number: Number
    action: str
    sentence: Sentence
    evidence: Digest
    decided_ms: Annotated[int, Field(ge=0)]
    state: ReleaseState
    channels: Annotated[tuple[ChannelRecord, ...], Field(max_length=2)] = ()
    """Appended to their channels after this record, in this order."""
    requests: Annotated[tuple[AnsweredRequest, ...], Field(max_length=MAX_REQUESTS)] = ()
    """Answered by this decision or earlier ones."""


def release_key(number: int) -> str:
    """Key of a decision."""
    return f"{RELEASES}{number:012d}.json"


def create_release(store: Store, record: ReleaseRecord) -> ReleaseRecord:
    """Create a decision; return the one that has its number now: this, or another service's.

    Raises:
        StoreError: the store did not answer; call again.
    """
    key = release_key(record.number)
    data = records.create_once(store, key, records.to_bytes(record))
    return records.parse(ReleaseRecord, data, where=f"{store.url}/{key}")


def read_release(store: Store, number: int) -> ReleaseRecord:
    """Read a decision.

    Raises:
        MissingError: there is none with this number.
        CorruptError: it is damaged.
        StoreError: the store did not answer.
    """
    key = release_key(number)
    record = records.parse(ReleaseRecord, records.fetch(store, key), where=f"{store.url}/{key}")
    if record.number != number:
        raise CorruptError(f"{store.url}/{key}: holds decision {record.number}")
    return record


def newest_release(store: Store) -> ReleaseRecord | None:
    """The newest decision; None before the first.

    Raises:
        CorruptError: it is damaged.
        StoreError: the store did not answer.
    """
    names = [info.key.removeprefix(RELEASES) for info in store.list(RELEASES)]
    numbers = [int(name[:12]) for name in names if len(name) == 17 and name[:12].isdecimal()]
    return read_release(store, max(numbers)) if numbers else None


def create_evidence(store: Store, decision: ReleaseDecision, *, decided_ms: int) -> str:
    """Create the object with a decision's figures, and return its digest.

    Raises:
        StoreError: the store did not answer; call again.
    """
    body = {
        "action": decision.action.value,
        "sentence": decision.sentence,
        "decidedMs": decided_ms,
        "evidence": dict(decision.evidence),
    }
    data = records.seal(body, name="evidence")
    digest = blake3(data).hexdigest()
    records.create_once(store, f"{EVIDENCE}{digest}.json", data)
    return digest


def channel_records(
    record: ReleaseRecord, *, stable: ChannelRecord | None, canary: ChannelRecord | None
) -> tuple[ChannelRecord, ...]:
    """Records that bring the channels to the state of a decision; pure.

    Stable comes first: a promoted candidate serves everyone before its own channel ends.

    Args:
        record: the decision.
        stable: newest record of the stable channel.
        canary: of the canary channel.
    """
    state, changes = record.state, []
    if state.stable != (stable and stable.served):
        changes.append(_channel_record(record, STABLE, stable, state.stable))
    test = state.canary
    served, experiment = (test.candidate, test.assignment) if test else (None, None)
    if (served, experiment) != ((canary.served, canary.experiment) if canary else (None, None)):
        changes.append(_channel_record(record, CANARY, canary, served, experiment))
    return tuple(changes)


def _channel_record(
    record: ReleaseRecord,
    channel: str,
    newest: ChannelRecord | None,
    served: ServedVersion | None,
    experiment: ChannelExperiment | None = None,
) -> ChannelRecord:
    return ChannelRecord(
        channel=channel,
        number=newest.number + 1 if newest else 1,
        served=served,
        experiment=experiment,
        action=record.action,
        sentence=record.sentence,
        evidence=record.evidence,
        decided_ms=record.decided_ms,
    )
