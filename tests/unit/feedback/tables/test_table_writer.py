"""Tables of figures: a row for all that counts, no text, and nothing of users who left."""

import asyncio
import io
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests.support.feedback import events as examples
from tests.support.feedback.failing_store import KilledError, KilledStore, KillPoint
from tests.support.feedback.lives import NOW_MS, SECRET, SERVER, Stores, living, read_all
from tests.support.feedback.turns import serve_version, turn, write_turns

from etude.common.blobs import MemoryStore, Store
from etude.common.errors import CorruptError
from etude.common.feedback import payloads
from etude.common.feedback.events import EVENTS
from etude.common.feedback.tables import PREFIX, PartPlace
from etude.feedback.ingest.intake import EventIntake
from etude.feedback.ledger.ledger import FeedbackLedger, open_ledger
from etude.feedback.ledger.user_keys import UserId
from etude.feedback.signals.registry import SIGNALS
from etude.feedback.tables import parts, schema, writer
from etude.feedback.tables.rows import TEXTS
from etude.feedback.tables.writer import TableWriter
from etude.feedback.windows.builder import WindowBuilder
from etude.feedback.windows.settings import WindowRules

RULES = WindowRules(num_rollouts=4, min_rollouts=2, max_age_s=1_000, horizon_s=100)
SETTLED_MS = NOW_MS + 2_000_000
NEXT_DAY_MS = NOW_MS + 2 * 86_400_000
USERS = ("a", "b", "c", "d")
LATER = "2026-11-01T09:00:00Z"
Table = list[dict[str, Any]]


def pseudonym(user: str) -> str:
    return SECRET.user_id("acme", user).digest


def read(store: Store, name: str) -> Table:
    """All rows of a table."""
    keys = [info.key for info in store.list(f"{PREFIX}{name}/")]
    return [row for key in keys for row in pq.read_table(io.BytesIO(store.get(key))).to_pylist()]


def users_of(store: Store, name: str) -> set[str]:
    return {row["user"] for row in read(store, name)} - {None}


async def send(intake: EventIntake, kind: str, user: str, number: int = 0, **fields: Any) -> int:
    event = examples.encoded(kind, id=f"{kind}-{user}-{number}", user=user, **fields)
    (answer,) = await intake.take([event], SERVER)
    return answer.status


async def write(ledger: FeedbackLedger, *, now_ms: int = SETTLED_MS) -> None:
    """One pass of a writer that has just started."""
    await asyncio.to_thread(TableWriter(ledger, RULES, clock_ms=lambda: now_ms).run_pass)


async def test_every_usable_event_is_one_row_however_often_it_is_written() -> None:
    stores = Stores()
    async with living(stores) as intake:
        table_writer = TableWriter(intake.ledger, RULES, clock_ms=lambda: SETTLED_MS)
        for number, kind in enumerate(examples.PAYLOADS):
            await send(intake, kind, USERS[number % 4])
            await asyncio.to_thread(table_writer.run_pass)
            await write(intake.ledger)
        stored = read_all(intake.ledger)
    rows = read(stores.ledger, "events")
    assert [(row["sequence"], row["kind"]) for row in rows] == [
        (event.sequence, event.kind) for event in stored
    ]
    assert len(rows) == len(examples.PAYLOADS) - 1, "a dry run is no event"
    by_kind = {row["kind"]: row for row in rows}
    assert by_kind["edit_observed"]["num_alive_lines"] == 1
    assert by_kind["turn_ended"]["outcome"] == "BrokenToolCall"
    assert by_kind["annotated"]["score"] == 0.5
    assert {row["granted"] for row in read(stores.ledger, "consents")} == {True}
    assert users_of(stores.ledger, "consents") == set(map(pseudonym, USERS))


async def test_no_word_of_a_user_is_in_a_table() -> None:
    stores = Stores()
    async with living(stores) as intake:
        for kind in examples.PAYLOADS:
            await send(intake, kind, "a")
        await write(intake.ledger)
    words = [
        str(payload[name])
        for payload in examples.PAYLOADS.values()
        for name in ("text", "diff")
        if name in payload
    ]
    names = ("events", "consents", "outcomes", "windows", "window_rollouts")
    found = repr([read(stores.ledger, name) for name in names])
    assert [word for word in [*words, "0123456789abcdef", "'a'"] if word in found] == []


def test_every_field_of_a_payload_is_a_column_or_a_text() -> None:
    fields = {
        name: field
        for model in EVENTS.values()
        for name, field in model.model_fields["data"]
        .annotation.model_fields[  # type: ignore[union-attr]
            "payload"
        ]
        .annotation.model_fields.items()
    }
    assert fields.keys() <= set(schema.EVENTS.names) | TEXTS
    long_texts = {name for name, field in fields.items() if field.annotation is str}
    limits = {name: repr(fields[name].metadata) for name in long_texts}
    assert {name for name, limit in limits.items() if str(payloads.MAX_TEXT) in limit} <= TEXTS


async def prepare(stores: Stores) -> None:
    """Four users with a rollout each, in one window."""
    serve_version(stores.ledger)
    async with living(stores) as intake:
        for user in USERS:
            await send(intake, "edit_applied", user)
            await send(intake, "edit_observed", user, ageS=100.5, numAliveLines=1)
        write_turns(stores.ledger, [turn(user, started_ms=NOW_MS) for user in USERS])
        builder = WindowBuilder(intake.ledger, RULES, clock_ms=lambda: SETTLED_MS)
        await asyncio.to_thread(builder.run_pass)


async def test_users_who_are_erased_disappear_from_every_table() -> None:
    stores = Stores()
    await prepare(stores)
    names = ("events", "consents", "outcomes", "window_rollouts")
    async with living(stores) as intake:
        table_writer = TableWriter(intake.ledger, RULES, clock_ms=lambda: NEXT_DAY_MS)
        await asyncio.to_thread(table_writer.run_pass)
        everyone = set(map(pseudonym, USERS))
        assert all(users_of(stores.ledger, name) == everyone for name in names)
        await intake.ledger.erase_user(UserId("acme", pseudonym("a")), now_ms=NOW_MS)
        await asyncio.to_thread(table_writer.run_pass)
    rest = everyone - {pseudonym("a")}
    assert {name: users_of(stores.ledger, name) for name in names} == dict.fromkeys(names, rest)
    tables = [data for key, data in stores.ledger.objects.items() if key.startswith(PREFIX)]
    assert not [data for data in tables if pseudonym("a").encode() in data]


async def test_a_new_writer_does_not_bring_back_the_decision_of_an_erased_user() -> None:
    stores = Stores()
    async with living(stores) as intake:
        for user in ("b", "a"):
            await send(intake, "shown", user)
        await write(intake.ledger)
        await intake.ledger.erase_user(UserId("acme", pseudonym("a")), now_ms=NOW_MS)
        await send(intake, "accepted", "b")
        await write(intake.ledger)
        await write(intake.ledger)
    assert users_of(stores.ledger, "consents") == {pseudonym("b")}


async def test_a_user_who_agrees_again_after_an_erasure_has_that_decision() -> None:
    stores = Stores()
    async with living(stores, now_ms=NEXT_DAY_MS) as intake:
        await send(intake, "shown", "a")
        await intake.ledger.erase_user(UserId("acme", pseudonym("a")), now_ms=NOW_MS)
        assert await send(intake, "shown", "a", 1, decided="2026-11-03T09:00:00Z") == 202
        await write(intake.ledger)
        await write(intake.ledger)
    assert [row["granted"] for row in read(stores.ledger, "consents")] == [True]
    assert len(read(stores.ledger, "events")) == 1


async def test_a_user_who_takes_consent_back_leaves_events_and_outcomes() -> None:
    stores = Stores()
    await prepare(stores)
    async with living(stores) as intake:
        await write(intake.ledger)
        assert await send(intake, "shown", "a", granted=False, decided=LATER) == 403
        await write(intake.ledger)
    rest = set(map(pseudonym, USERS[1:]))
    assert users_of(stores.ledger, "events") == users_of(stores.ledger, "outcomes") == rest
    decisions = [row for row in read(stores.ledger, "consents") if row["user"] == pseudonym("a")]
    assert [row["granted"] for row in decisions] == [True, False]


async def leave(stores: Stores) -> None:
    """Of the users in tables one is erased, one takes consent back, and two go on."""
    async with living(stores) as intake:
        await write(intake.ledger)
    async with living(stores, now_ms=NEXT_DAY_MS) as intake:
        await send(intake, "accepted", "b", 1)
        await intake.ledger.erase_user(UserId("acme", pseudonym("a")), now_ms=NEXT_DAY_MS)
        await send(intake, "thumb", "c", granted=False, decided=LATER)
        for number in range(5):
            await send(intake, "accepted", "d", number)


@pytest.mark.parametrize("takes_effect", [False, True])
async def test_a_kill_at_any_write_leaves_what_the_next_writer_completes(
    monkeypatch: pytest.MonkeyPatch, *, takes_effect: bool
) -> None:
    monkeypatch.setattr(writer, "BATCH_ITEMS", 4)
    monkeypatch.setattr(parts, "PART_ROWS", 3)
    stores = Stores()
    await prepare(stores)
    await leave(stores)
    names = ("events", "consents", "outcomes", "windows", "window_rollouts")

    def run(store: MemoryStore) -> None:
        ledger = open_ledger(store, stores.keys, SECRET, uid="test", holder="test")
        TableWriter(ledger, RULES, clock_ms=lambda: NEXT_DAY_MS).run_pass()

    whole = MemoryStore(objects=dict(stores.ledger.objects))
    run(whole)
    expected = {name: read(whole, name) for name in names}
    assert users_of(whole, "events") == {pseudonym("b"), pseudonym("d")}
    num_kills = 0
    while True:
        point = KillPoint(at=num_kills + 1, takes_effect=takes_effect)
        store = KilledStore(point=point, objects=dict(stores.ledger.objects))
        try:
            run(store)
        except KilledError:
            num_kills += 1
        else:
            break
        left = MemoryStore(objects=dict(store.objects))
        run(left)
        assert {name: read(left, name) for name in names} == expected, num_kills
    assert num_kills >= 8


async def test_outcomes_follow_their_rollouts_until_the_day_is_settled() -> None:
    stores = Stores()
    serve_version(stores.ledger)
    async with living(stores) as intake:
        for user in USERS:
            await send(intake, "edit_applied", user)
        write_turns(stores.ledger, [turn(user, started_ms=NOW_MS) for user in USERS])
        await write(intake.ledger, now_ms=NOW_MS + 1)
        early = read(stores.ledger, "outcomes")
        assert len(early) == len(USERS) * len(SIGNALS)
        kept = [row for row in early if row["signal"] == "edit_persistence"]
        assert {row["state"] for row in kept} == {"Waiting"}
        for user in USERS:
            await send(intake, "edit_observed", user, ageS=100.5, numAliveLines=1)
        await write(intake.ledger)
        later = [row for row in read(stores.ledger, "outcomes") if row["state"] == "Final"]
        values = {
            row["user"]: row["numerator"] / row["denominator"]
            for row in later
            if row["signal"] == "edit_persistence"
        }
        assert values == {pseudonym(user): 0.5 for user in USERS}
        stores.ledger.clock = lambda: NEXT_DAY_MS / 1_000
        await write(intake.ledger, now_ms=NEXT_DAY_MS)
        final = read(stores.ledger, "outcomes")
        write_turns(stores.ledger, [turn("a", "r-2", started_ms=NOW_MS)])
        await write(intake.ledger, now_ms=NEXT_DAY_MS)
    assert read(stores.ledger, "outcomes") == final
    assert "Waiting" not in {row["state"] for row in final}


async def test_days_never_go_back_with_the_clock() -> None:
    stores = Stores()
    async with living(stores, now_ms=NEXT_DAY_MS) as intake:
        await send(intake, "shown", "a")
        await write(intake.ledger)
    async with living(stores, now_ms=NOW_MS) as intake:
        await send(intake, "shown", "b")
        await write(intake.ledger)
        await write(intake.ledger)
    days = {PartPlace.parse(info.key) for info in stores.ledger.list(f"{PREFIX}events/")}
    assert days == {PartPlace("events", parts.day_of(1_000 * NEXT_DAY_MS))}
    assert len(read(stores.ledger, "events")) == 2


async def test_a_damaged_part_is_named_with_its_remedy() -> None:
    stores = Stores()
    async with living(stores) as intake:
        await send(intake, "shown", "a")
        await write(intake.ledger)
        (key,) = [info.key for info in stores.ledger.list(f"{PREFIX}events/")]
        stores.ledger.put(key, b"PAR1 damaged PAR1")
        with pytest.raises(CorruptError, match=r"events/.* damaged; delete tables/"):
            await write(intake.ledger)
        stores.ledger.delete([key])
        await write(intake.ledger)
    assert len(read(stores.ledger, "events")) == 1
