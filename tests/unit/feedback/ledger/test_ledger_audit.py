"""The audit of a ledger: nothing to report of an honest one, and each kind of damage by name."""

from collections.abc import Sequence

import pytest
from tests.support.feedback import events as examples
from tests.support.feedback.lives import NOW_MS, SECRET, SERVER, Stores, living

from etude.common.blobs import MemoryStore
from etude.common.durable_log import encode_segment
from etude.feedback.ledger import records
from etude.feedback.ledger.audit import audit_ledger
from etude.feedback.ledger.ledger import LEDGER
from etude.v1.feedback_ledger_pb2 import (
    FeedbackConsent,
    FeedbackErasure,
    FeedbackEventRecord,
    FeedbackOpen,
    FeedbackRecord,
)


async def test_an_honest_ledger_has_no_findings() -> None:
    stores, head = Stores(), b""
    for life in range(3):
        async with living(stores) as intake:
            await intake.take([examples.encoded(id=f"{life}-{n}") for n in range(4)], SERVER)
            if life == 2:
                await intake.ledger.erase_user(SECRET.user_id("acme", "u-1"), now_ms=NOW_MS)
            head = intake.ledger.chain
    audit = audit_ledger(stores.ledger, uid="test")
    assert audit.findings == []
    assert audit.num_records == {"open": 3, "consent": 1, "event": 12, "erasure": 1}
    assert audit.head == head


def consent(*, granted: bool = True) -> FeedbackRecord:
    return FeedbackRecord(consent=FeedbackConsent(tenant="t", user_digest="u", granted=granted))


def event(number: int, generation: int = 0) -> FeedbackRecord:
    body = FeedbackEventRecord(
        tenant="t", user_digest="u", key_generation=generation, event_digest=bytes([number])
    )
    return FeedbackRecord(event=body)


def erasure(generation: int = 0) -> FeedbackRecord:
    body = FeedbackErasure(tenant="t", user_digest="u", key_generation=generation)
    return FeedbackRecord(erasure=body)


def ledger_of(bodies: Sequence[FeedbackRecord]) -> MemoryStore:
    """A ledger with these records, whoever wrote them."""
    opening = FeedbackRecord(open=FeedbackOpen(ledger_uid="test", epoch=1))
    chain, frames = records.FIRST_CHAIN, []
    for sequence, body in enumerate([opening, *bodies], 1):
        frame, chain = records.encode_record(sequence, body, previous=chain)
        frames.append(frame)
    store = MemoryStore()
    store.create(
        f"{LEDGER}000001/000000000001.wal", encode_segment("test", 1, first=1, frames=frames)
    )
    return store


@pytest.mark.parametrize(
    ("bodies", "invariants"),
    [
        ([], []),
        ([consent(), event(1), event(2)], []),
        ([consent(), event(1), event(1)], ["unique"]),
        ([event(1)], ["consent"]),
        ([consent(), consent(granted=False), event(1)], ["consent"]),
        ([consent(), event(1, generation=1)], ["erasure"]),
        ([consent(), event(1), erasure(), consent(), event(2, generation=1)], []),
        ([consent(), erasure(), consent(), event(1)], ["erasure"]),
        ([consent(), erasure(), event(1, generation=1)], ["consent"]),
        ([consent(), erasure(1)], ["erasure"]),
    ],
)
def test_each_broken_invariant_is_named(
    bodies: Sequence[FeedbackRecord], invariants: list[str]
) -> None:
    found = audit_ledger(ledger_of(bodies), uid="test").findings
    assert [finding.invariant for finding in found] == invariants


def test_damage_of_the_log_is_a_finding() -> None:
    store = ledger_of([consent(), event(1)])
    (key,) = store.objects
    store.objects[key] = store.objects[key][:-1]
    (finding,) = audit_ledger(store, uid="test").findings
    assert finding.invariant == "log"
    (finding,) = audit_ledger(store, uid="other").findings
    assert finding.invariant == "log"
