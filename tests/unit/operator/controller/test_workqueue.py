"""The work queue: at most once in line, at most once at work."""

import asyncio
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from etude.operator.controller.workqueue import FIRST_RETRY_S, LONGEST_RETRY_S, WorkQueue
from etude.operator.manifests import Ref

A, B = Ref("RLRun", "lab", "a"), Ref("RLRun", "lab", "b")


async def test_keys_come_in_order_and_once() -> None:
    queue = WorkQueue()
    for key in (A, B, A):
        queue.add(key)
    assert len(queue) == 2
    assert [await queue.take(), await queue.take()] == [A, B]


async def test_urgent_keys_go_first_but_for_one_turn_in_four() -> None:
    urgent = [Ref("RLRun", "lab", f"new-{number}") for number in range(7)]
    others = [Ref("RLRun", "lab", f"old-{number}") for number in range(3)]
    queue = WorkQueue(is_urgent=urgent.__contains__)
    for key in (*others, *urgent):
        queue.add(key)
    taken = [await queue.take() for _ in range(10)]
    assert [key in others for key in taken[:8]] == [False, False, False, True] * 2
    assert [key for key in taken if key in urgent] == urgent
    assert [key for key in taken if key in others] == others


async def test_a_key_in_line_that_becomes_urgent_changes_lines() -> None:
    urgent: set[Ref] = set()
    queue = WorkQueue(is_urgent=urgent.__contains__)
    queue.add(A)
    queue.add(B)
    urgent.add(B)
    queue.add(B)
    urgent.clear()
    queue.add(B)
    assert len(queue) == 2
    assert [await queue.take(), await queue.take()] == [B, A]


async def test_what_is_in_line_and_how_long_it_was_is_counted() -> None:
    def shown(name: str) -> float:
        return REGISTRY.get_sample_value(f"etude_workqueue_{name}") or 0.0

    adds, waits, retries = shown("adds_total"), shown("wait_seconds_count"), shown("retries_total")
    queue = WorkQueue()
    for key in (A, B, A):
        queue.add(key)
    assert (shown("depth"), shown("adds_total") - adds) == (2, 3)
    queue.retry(await queue.take())
    assert (shown("depth"), shown("wait_seconds_count") - waits) == (1, 1)
    assert shown("retries_total") - retries == 1


async def test_a_key_that_changes_while_it_is_at_work_comes_again_after() -> None:
    queue = WorkQueue()
    queue.add(A)
    assert await queue.take() == A
    queue.add(A)
    assert len(queue) == 0
    queue.mark_done(A)
    assert await queue.take() == A


async def test_a_delayed_key_comes_when_it_is_due_or_earlier_when_it_changes() -> None:
    queue = WorkQueue()
    queue.add_after(A, 0.01)
    async with asyncio.timeout(10):
        assert await queue.take() == A
    queue.mark_done(A)
    queue.add_after(A, 600)
    queue.add(A)
    async with asyncio.timeout(10):
        assert await queue.take() == A


async def test_the_earliest_of_two_delays_counts() -> None:
    queue = WorkQueue()
    queue.add_after(A, 600)
    queue.add_after(A, 0.01)
    async with asyncio.timeout(10):
        assert await queue.take() == A


async def test_failures_may_wait_twice_as_long_each_time_up_to_a_limit() -> None:
    queue = WorkQueue(jitter=lambda: 1.0)
    delays = [await _failed(queue) for _ in range(25)]
    assert delays[0] == FIRST_RETRY_S
    assert all(
        later == min(2 * earlier, LONGEST_RETRY_S) for earlier, later in itertools.pairwise(delays)
    )
    queue.add(A)
    await queue.take()
    queue.mark_done(A)
    assert await _failed(queue) == FIRST_RETRY_S


@given(st.lists(st.floats(min_value=0, max_value=1, exclude_max=True), min_size=1, max_size=20))
def test_a_failure_waits_any_part_of_its_longest_wait(shares: list[float]) -> None:
    async def run() -> None:
        drawn = iter(shares)
        queue = WorkQueue(jitter=lambda: next(drawn))
        for number, share in enumerate(shares):
            longest_s = min(FIRST_RETRY_S * 2**number, LONGEST_RETRY_S)
            assert await _failed(queue) == share * longest_s

    asyncio.run(run())


async def _failed(queue: WorkQueue) -> float:
    queue.add(A)
    await queue.take()
    return queue.retry(A)


@settings(max_examples=50)
@given(st.lists(st.sampled_from(["add a", "add b", "take", "done"]), max_size=40))
def test_nothing_that_was_added_is_ever_lost_or_worked_on_twice_at_once(steps: list[str]) -> None:
    async def run() -> None:
        queue = WorkQueue()
        owed: set[Ref] = set()
        working: list[Ref] = []
        for step in steps:
            if step.startswith("add"):
                key = A if step.endswith("a") else B
                queue.add(key)
                owed.add(key)
            elif step == "take" and len(queue):
                key = await queue.take()
                assert key not in working
                owed.discard(key)
                working.append(key)
            elif step == "done" and working:
                queue.mark_done(working.pop())
        for key in working:
            queue.mark_done(key)
        while owed:
            key = await queue.take()
            owed.discard(key)
            queue.mark_done(key)

    asyncio.run(run())


async def test_a_date_that_is_given_again_and_again_is_kept_once() -> None:
    queue = WorkQueue()
    for _ in range(1_000):
        queue.add_after(A, 31_536_000.0)
        queue.add_after(B, 0.0)
        queue.add(A)
        for _ in range(2):
            queue.mark_done(await queue.take())
    queue.add_after(A, 31_536_000.0)
    assert len(queue._heap) < 100
