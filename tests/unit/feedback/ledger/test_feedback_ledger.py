"""The ledger: encrypted at rest, the same after a restart, closed to other tenants."""

import asyncio
import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.feedback import events as examples
from tests.support.feedback.lives import NOW_MS, SECRET, SERVER, Stores, ids, living, read_all

from etude.common.blobs import MemoryStore, ObjectInfo
from etude.common.durable_log import segments
from etude.common.durable_log.segments import decode_segment, encode_frame, encode_segment
from etude.common.errors import CorruptError, FencedError, UserError
from etude.feedback.ledger import ledger as ledger_module
from etude.feedback.ledger.ledger import LEDGER, open_ledger
from etude.feedback.ledger.user_keys import LedgerSecret

MARKER = "purple-elephant"


async def test_an_event_is_read_back_as_it_was_sent_also_after_a_restart() -> None:
    stores = Stores()
    sent = examples.event("followup", id="7", text="please undo")
    async with living(stores) as intake:
        answers = await intake.take([json.dumps(sent).encode()], SERVER)
        assert [answer.status for answer in answers] == [202]
        assert ids(intake.ledger) == ["7"]
    async with living(stores) as intake:
        (event,) = read_all(intake.ledger)
        found = json.loads(event.text)
        assert (event.kind, event.received_ms) == ("followup", NOW_MS)
        assert found["data"]["payload"] == sent["data"]["payload"]
        assert found["data"]["consent"] == sent["data"]["consent"]
        assert (found["id"], found["subject"]) == ("7", "conversation-1")


async def test_reading_goes_on_behind_a_sequence() -> None:
    stores = Stores()
    async with living(stores) as intake:
        for number in range(6):
            await intake.take([examples.encoded(id=str(number))], SERVER)
        events = read_all(intake.ledger)
        for position, event in enumerate(events):
            for limit in (1, 2, 100):
                later = read_all(intake.ledger, after=event.sequence, limit=limit)
                assert later == events[position + 1 :]


async def test_a_page_reads_few_segments_and_bytes_and_lists_the_store_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger_module, "MAX_PAGE_SEGMENTS", 3)
    list_objects, num_lists = MemoryStore.list, 0

    def count(store: MemoryStore, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        nonlocal num_lists
        num_lists += 1
        return list_objects(store, prefix, after)

    async with living(Stores()) as intake:
        other = SERVER._replace(tenant="other")
        for number in range(12):
            await intake.take([examples.encoded(id=str(number), tenant="other")], other)
        await intake.take([examples.encoded(id="mine")], SERVER)
        monkeypatch.setattr(MemoryStore, "list", count)
        first = intake.ledger.read_page(tenant="acme", limit=10)
        assert first.events == []
        assert 0 < first.end < intake.ledger.log.durable_sequence
        assert ids(intake.ledger) == ["mine"]
        assert num_lists <= 2, "one for the pages, one for the end"
        monkeypatch.setattr(ledger_module, "MAX_PAGE_BYTES", 1)
        assert [len(ids(intake.ledger, tenant)) for tenant in ("acme", "other")] == [1, 12]


async def test_a_damaged_key_costs_the_events_of_its_user_alone() -> None:
    stores = Stores()
    async with living(stores) as intake:
        events = [examples.encoded(id="1", user="a"), examples.encoded(id="2", user="b")]
        await intake.take(events, SERVER)
    digest = SECRET.user_id("acme", "a").digest
    (name,) = (key for key in stores.keys.objects if digest in key)
    stores.keys.objects[name] = bytes(60)
    async with living(stores) as intake:
        page = intake.ledger.read_page(tenant="acme", limit=10)
        assert (len(page.events), page.num_unreadable) == (1, 1)
        events = [examples.encoded(id="3", user="a"), examples.encoded(id="4", user="b")]
        answers = await intake.take(events, SERVER)
        assert [(a.status, a.reason) for a in answers] == [(500, "DamagedKey"), (202, "Stored")]
        assert ids(intake.ledger) == ["2", "4"]


async def test_no_store_holds_the_text_or_the_name_of_a_user() -> None:
    stores = Stores()
    async with living(stores) as intake:
        await intake.take([examples.encoded(user="jo-the-user", text=MARKER)], SERVER)
    assert MARKER.encode() not in stores.contents()
    assert b"jo-the-user" not in stores.contents()
    assert not any("jo-the-user" in key for key in [*stores.ledger.objects, *stores.keys.objects])


async def test_other_tenants_read_nothing() -> None:
    stores = Stores()
    async with living(stores) as intake:
        await intake.take([examples.encoded()], SERVER)
        assert ids(intake.ledger, "other") == []
        assert ids(intake.ledger, "") == []
        # The same user and id at another tenant are another user and another event.
        other = SERVER._replace(tenant="other")
        answers = await intake.take([examples.encoded(tenant="other", text="theirs")], other)
        assert [answer.status for answer in answers] == [202]
        assert [len(ids(intake.ledger, tenant)) for tenant in ("acme", "other")] == [1, 1]


async def test_a_user_cannot_take_the_id_of_another_users_event() -> None:
    async with living(Stores()) as intake:
        events = [examples.encoded(id="1", user="a", text="mine"), examples.encoded(id="1")]
        answers = await intake.take(events, SERVER)
        assert [(a.status, a.reason) for a in answers] == [(202, "Stored")] * 2
        assert ids(intake.ledger) == ["1", "1"]


async def test_an_erased_user_is_unreadable_and_others_stay() -> None:
    stores = Stores()
    async with living(stores) as intake:
        await intake.take([examples.encoded(id="1", user="a"), examples.encoded(id="2")], SERVER)
        user = SECRET.user_id("acme", "a")
        keys = dict(stores.keys.objects)
        assert await intake.ledger.erase_user(user, now_ms=NOW_MS) == 1
        assert ids(intake.ledger) == ["2"]
        assert len(stores.keys.objects) == len(keys) - 1
        # Sent again, it does not come back.
        answers = await intake.take([examples.encoded(id="1", user="a")], SERVER)
        assert [(a.status, a.reason) for a in answers] == [(403, "Revoked")]
    async with living(stores) as intake:
        assert ids(intake.ledger) == ["2"]


async def test_a_user_may_come_back_with_a_later_decision_and_another_key() -> None:
    stores = Stores()
    async with living(stores) as intake:
        await intake.take([examples.encoded(id="1")], SERVER)
        await intake.ledger.erase_user(SECRET.user_id("acme", "u-1"), now_ms=NOW_MS)
    async with living(stores, now_ms=NOW_MS + 90_000_000) as intake:
        later = examples.encoded(id="2", decided="2026-11-03T00:00:00Z")
        answers = await intake.take([later], SERVER)
        assert [answer.status for answer in answers] == [202]
        assert ids(intake.ledger) == ["2"]


async def test_an_older_service_stops_when_a_newer_one_took_over() -> None:
    stores = Stores()
    with pytest.raises(FencedError):  # noqa: PT012 - the error is that of the end of a life
        async with living(stores) as older:
            await older.take([examples.encoded(id="1")], SERVER)
            writers = [task for task in asyncio.all_tasks() if task.get_name() == "ledger"]
            async with living(stores) as newer:
                await newer.take([examples.encoded(id="2")], SERVER)
                older.ledger.append_consent(
                    SECRET.user_id("acme", "u-1"),
                    older.ledger.state.consents[SECRET.user_id("acme", "u-1")],
                    now_ms=NOW_MS,
                )
                await asyncio.wait(writers)
    async with living(stores) as intake:
        assert ids(intake.ledger) == ["1", "2"]


async def test_a_ledger_of_another_name_or_secret_is_refused() -> None:
    stores = Stores()
    async with living(stores) as intake:
        await intake.take([examples.encoded()], SERVER)
    with pytest.raises(CorruptError, match="belongs to test"):
        open_ledger(stores.ledger, stores.keys, SECRET, uid="other", holder="x")
    async with living(stores) as intake:
        with pytest.raises(UserError, match="another secret") as refusal:
            open_ledger(stores.ledger, stores.keys, LedgerSecret(bytes(32)), uid="test", holder="x")
        assert refusal.value.problem.where == "ETUDE_FEEDBACK_SECRET_FILE"
        intake.ledger.check_alone()  # the refused one fenced nobody


async def test_a_damaged_key_of_one_user_does_not_keep_the_others_from_their_ledger() -> None:
    stores = Stores()
    async with living(stores) as intake:
        for number in range(3):
            await intake.take([examples.encoded(id=str(number), user=f"u-{number}")], SERVER)
    damaged, *_ = sorted(stores.keys.objects)
    stores.keys.objects[damaged] = bytes(60)
    async with living(stores) as intake:
        page = intake.ledger.read_page(tenant="acme", limit=10)
        assert (len(page.events), page.num_unreadable) == (2, 1)


async def stored() -> Stores:
    stores = Stores()
    async with living(stores) as intake:
        for number in range(3):
            await intake.take([examples.encoded(id=str(number))], SERVER)
    return stores


async def test_any_flipped_bit_of_the_log_is_found() -> None:
    stores = await stored()
    keys = [key for key in stores.ledger.objects if key.endswith(".wal")]

    @given(data=st.data())
    def flip(data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(keys))
        raw = bytearray(stores.ledger.objects[key])
        bit = data.draw(st.integers(0, len(raw) * 8 - 1))
        raw[bit // 8] ^= 1 << bit % 8
        broken = Stores()
        broken.ledger.objects.update(stores.ledger.objects, **{key: bytes(raw)})
        with pytest.raises(CorruptError):
            open_ledger(broken.ledger, broken.keys, SECRET, uid="test", holder="x")

    flip()


async def test_a_record_that_was_altered_with_its_checksums_breaks_the_chain() -> None:
    stores = await stored()
    key = sorted(key for key in stores.ledger.objects if key.endswith(".wal"))[1]
    segment = decode_segment(stores.ledger.objects[key], where=key)
    frames = []
    for record in segment.records:
        payload = bytearray(record.payload)
        payload[-1] ^= 1
        frames.append(encode_frame(record.kind, record.sequence, bytes(payload)))
    forged = encode_segment(segment.owner, segment.epoch, first=segment.first, frames=frames)
    stores.ledger.objects[key] = forged
    assert segments.decode_segment(forged, where=key).first == segment.first
    with pytest.raises(CorruptError, match="chain"):
        open_ledger(stores.ledger, stores.keys, SECRET, uid="test", holder="x")


async def test_a_removed_segment_is_found() -> None:
    stores = await stored()
    logs = sorted(key for key in stores.ledger.objects if key.startswith(LEDGER) and "wal" in key)
    del stores.ledger.objects[logs[1]]
    with pytest.raises(CorruptError, match="missing"):
        open_ledger(stores.ledger, stores.keys, SECRET, uid="test", holder="x")
