"""Events that come again, late, in another order or in several lives of the service count once."""

import json

from hypothesis import given
from hypothesis import strategies as st
from tests.support.feedback import events as examples
from tests.support.feedback.lives import SERVER, Stores, ids, living, read_all

from etude.feedback.ledger.audit import audit_ledger

NUM_EVENTS = 6
deliveries = st.lists(st.integers(0, NUM_EVENTS - 1), min_size=1, max_size=20)


@given(lives=st.lists(deliveries, min_size=1, max_size=4))
async def test_deliveries_in_any_order_and_number_count_once(lives: list[list[int]]) -> None:
    stores = Stores()
    seen: set[int] = set()
    for delivered in lives:
        async with living(stores) as intake:
            batch = [examples.encoded(id=f"e{n}", user=f"u{n % 2}") for n in delivered]
            for number, answer in zip(delivered, await intake.take(batch, SERVER), strict=True):
                assert answer.status == (200 if number in seen else 202)
                seen.add(number)
    async with living(stores) as intake:
        found = ids(intake.ledger)
        assert sorted(found) == sorted(f"e{n}" for n in seen)
        events = read_all(intake.ledger)
        assert [event.sequence for event in events] == sorted({e.sequence for e in events})
    assert audit_ledger(stores.ledger, uid="test").findings == []


@given(
    fields=st.permutations(list(examples.event())),
    indent=st.sampled_from([None, 2]),
    ascii_only=st.booleans(),
)
async def test_the_same_event_written_otherwise_is_the_same(
    fields: list[str], indent: int | None, *, ascii_only: bool
) -> None:
    event = examples.event(text="größer")
    again = json.dumps(
        {name: event[name] for name in fields}, indent=indent, ensure_ascii=ascii_only
    ).encode()
    stores = Stores()
    async with living(stores) as intake:
        answers = await intake.take([json.dumps(event).encode(), again], SERVER)
        assert [answer.status for answer in answers] == [202, 200]


async def test_a_batch_with_a_decision_for_and_one_against_is_taken_in_order() -> None:
    stores = Stores()
    async with living(stores) as intake:
        batch = [
            examples.encoded(id="1", decided="2026-11-01T08:00:00Z"),
            examples.encoded(id="2", granted=False, decided="2026-11-01T09:00:00Z"),
            examples.encoded(id="3", decided="2026-11-01T08:00:00Z"),
            examples.encoded(id="4", decided="2026-11-01T10:00:00Z"),
        ]
        answers = await intake.take(batch, SERVER)
        assert [a.reason for a in answers] == ["Stored", "NotGranted", "Revoked", "Stored"]
        assert ids(intake.ledger) == ["1", "4"]
