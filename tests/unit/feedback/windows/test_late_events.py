"""Events that come late: a rollout waits for the end of its task, and what is later is counted."""

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.feedback import lives
from tests.support.feedback.lives import NOW_MS, SECRET, Stores, living
from tests.support.feedback.turns import serve_version, turn, write_turns

from etude.common.feedback import windows
from etude.feedback.ingest.intake import EventIntake
from etude.feedback.windows.audit import audit_windows
from etude.feedback.windows.builder import WindowBuilder
from etude.feedback.windows.settings import WindowRules

RULES = WindowRules(num_rollouts=4, min_rollouts=2, max_age_s=1_000, horizon_s=100.0)
SETTLED_MS = NOW_MS + 200_000
USERS = ("a", "b", "c", "d")


async def send(intake: EventIntake, kind: str, user: str, **fields: Any) -> None:
    """Send one event, which is stored."""
    assert await lives.send(intake, kind, user, **fields) == 202


def build(intake: EventIntake, *, now_ms: int = SETTLED_MS) -> WindowBuilder:
    return WindowBuilder(intake.ledger, RULES, clock_ms=lambda: now_ms)


async def run(builder: WindowBuilder) -> None:
    await asyncio.to_thread(builder.run_pass)


async def test_a_rollout_waits_for_the_end_of_its_task_until_that_is_censored() -> None:
    stores = Stores()
    serve_version(stores.ledger)
    rules = replace(RULES, num_rollouts=2, outcome_s=86_400.0)

    def at(intake: EventIntake, now_ms: int) -> WindowBuilder:
        return WindowBuilder(intake.ledger, rules, clock_ms=lambda: now_ms)

    async with living(stores) as intake:
        for user in USERS:
            await send(intake, "edit_applied", user)
        await send(intake, "shown", "asked")
        write_turns(stores.ledger, [turn(user, started_ms=NOW_MS) for user in (*USERS, "asked")])
        await run(at(intake, SETTLED_MS))
        assert not [*windows.list_windows(stores.ledger)], "four wait for an end, and one is alone"
        await send(intake, "task_closed", "a", outcome="Merged")
        await run(at(intake, SETTLED_MS))
        await run(at(intake, NOW_MS + 86_399_000))
        assert [*windows.list_windows(stores.ledger)] == [1]
        await run(at(intake, NOW_MS + 86_400_000))
    names = {SECRET.user_id("acme", user).digest: user for user in (*USERS, "asked")}
    first, second = (windows.read_window(stores.ledger, number) for number in (1, 2))
    assert {names[each.user] for each in first.rollouts} == {"a", "asked"}
    assert len(second.rollouts) == 2
    assert audit_windows(stores.ledger, SECRET, RULES, uid="test").findings == []


@settings(max_examples=20, deadline=None)
@given(
    lives=st.lists(
        st.tuples(
            st.lists(st.tuples(st.sampled_from(USERS), st.sampled_from(["shown", "accepted"]))),
            st.sampled_from([0, 1, 2]),
        ),
        min_size=2,
        max_size=4,
    )
)
def test_every_event_counts_in_the_window_of_its_rollout_or_in_the_next_one_as_late(
    lives: list[tuple[list[tuple[str, str]], int]],
) -> None:
    """Each life sends events about the first rollouts; then one of the builders closes a window."""
    stores = Stores()
    serve_version(stores.ledger)

    async def live() -> None:
        async with living(stores) as intake:
            for user in USERS:
                await send(intake, "thumb", user)
            builders = [build(intake), build(intake)]
            for number, (events, choice) in enumerate(lives):
                for place, (user, kind) in enumerate(events):
                    await send(intake, kind, user, turn=1_000 * number + place)
                turns = [turn(user, f"r-{number + 1}", started_ms=NOW_MS) for user in USERS]
                write_turns(stores.ledger, turns)
                # The third one is a service that has just started.
                await run([*builders, build(intake)][choice])

    asyncio.run(live())
    found = [windows.read_window(stores.ledger, number + 1) for number in range(len(lives))]
    assert [len(each.rollouts) for each in found] == [4] * len(lives)
    expected = [{}, *(Counter(kind for _, kind in events) for events, _ in lives[1:])]
    assert [each.late for each in found] == expected
    audit = audit_windows(stores.ledger, SECRET, RULES, uid="test")
    assert (audit.findings, audit.num_served, audit.num_trained) == (
        [],
        4 * len(lives),
        4 * len(lives),
    )


async def test_what_a_builder_read_behind_a_window_of_another_one_is_late() -> None:
    stores = Stores()
    serve_version(stores.ledger)
    async with living(stores) as intake:
        for user in USERS:
            await send(intake, "shown", user)
        write_turns(stores.ledger, [turn(user, started_ms=NOW_MS) for user in USERS])
        slow = build(intake, now_ms=NOW_MS)
        await run(build(intake))
        created = windows.read_window(stores.ledger, 1)
        stores.ledger.delete([windows.window_key(1)])
        await send(intake, "accepted", "a")
        await run(slow)
        assert len(slow.waiting.histories) == 4, "it knows no window, and nothing is settled"
        windows.create_window(stores.ledger, created)
        await run(slow)
    assert [each.kind for each in slow.waiting.late] == ["accepted"]
