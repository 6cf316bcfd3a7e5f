"""kill -9 at every write of the stores: acknowledged events are there once, erased ones never."""

import asyncio
import contextlib
from collections.abc import Sequence

import pytest
from tests.support.feedback import events as examples
from tests.support.feedback.failing_store import KilledError, KilledStore, KillPoint
from tests.support.feedback.lives import NOW_MS, SECRET, SERVER, Stores, ids, living

from etude.feedback.ingest.intake import EventIntake
from etude.feedback.ledger.audit import audit_ledger

Step = tuple[str, str]
"""What is done, and to which user."""

STEPS: Sequence[Step] = (
    ("event", "a"),
    ("event", "b"),
    ("event", "a"),
    ("erase", "a"),
    ("event", "b"),
    ("event", "a"),
    ("event", "c"),
)


async def perform(intake: EventIntake, number: int, step: Step) -> int:
    """Do one step; returns the answer's status."""
    what, user = step
    if what == "erase":
        await intake.ledger.erase_user(SECRET.user_id("acme", user), now_ms=NOW_MS)
        return 200
    (answer,) = await intake.take([examples.encoded(id=str(number), user=user)], SERVER)
    return answer.status


async def live(stores: Stores) -> list[int]:
    """One life up to its end or its kill; returns the statuses that clients were told."""
    told: list[int] = []
    with contextlib.suppress(KilledError, asyncio.CancelledError):
        async with living(stores) as intake:
            (writer,) = (t for t in asyncio.all_tasks() if t.get_name() == "ledger")
            for number, step in enumerate(STEPS):
                work = asyncio.create_task(perform(intake, number, step))
                await asyncio.wait({work, writer}, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():  # the writer died, and took the process with it
                    work.cancel()
                    break
                told.append(work.result())
    return told


def expected_ids() -> list[str]:
    """Usable events at the end: a's are erased, and a did not consent again."""
    return ["1", "4", "6"]


async def test_without_a_kill_everything_is_acknowledged() -> None:
    stores = Stores()
    assert await live(stores) == [202, 202, 202, 200, 202, 403, 202]
    async with living(stores) as intake:
        assert ids(intake.ledger) == expected_ids()


@pytest.mark.parametrize("takes_effect", [False, True])
async def test_a_kill_at_any_write_loses_and_doubles_nothing(*, takes_effect: bool) -> None:
    num_kills = 0
    while True:
        point = KillPoint(at=num_kills + 1, takes_effect=takes_effect)
        stores = Stores(KilledStore(point=point), KilledStore(point=point))
        told = await live(stores)
        if not point.is_dead:
            break
        num_kills += 1
        await check_successor(stores, told)
    assert num_kills >= 12  # epoch, opening, 3 keys, 6 groups, deletion


async def check_successor(stores: Stores, told: list[int]) -> None:
    """A successor on what the stores hold: first as it is, then when clients send again."""
    left = Stores()
    left.ledger.objects.update(stores.ledger.objects)
    left.keys.objects.update(stores.keys.objects)
    async with living(left) as intake:
        found = ids(intake.ledger)
        assert len(set(found)) == len(found)
        is_erased = len(told) > 3
        acknowledged = {
            str(number)
            for number, status in enumerate(told)
            if status == 202 and not (is_erased and STEPS[number][1] == "a")
        }
        if len(told) != 3:  # while the erasure is under way, a's events may be gone or not
            assert acknowledged <= set(found)
        if is_erased:
            assert not {"0", "2", "5"} & set(found)
    assert (await live(left))[-1] in {200, 202}
    async with living(left) as intake:
        assert ids(intake.ledger) == expected_ids()
    assert audit_ledger(left.ledger, uid="test").findings == []
