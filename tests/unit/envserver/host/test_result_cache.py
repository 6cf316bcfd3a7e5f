"""When a result may stand for another run."""

import asyncio

from etude.envserver.drivers.base import CommandOutcome
from etude.envserver.host.result_cache import MAX_ENTRY_BYTES, Compute, ResultCache


class Runs:
    """Counts executions; each waits until it is let go."""

    def __init__(self, outcome: CommandOutcome, *, is_general: bool = True) -> None:
        self.count = 0
        self.go = asyncio.Event()
        self.go.set()
        self._answer = (outcome, is_general)

    async def __call__(self) -> tuple[CommandOutcome, bool]:
        self.count += 1
        await self.go.wait()
        return self._answer


PASSED = CommandOutcome(output=b"1 passed\n", exit_code=0)


async def twice(compute: Compute) -> None:
    cache = ResultCache()
    await cache.get("key", compute)
    await cache.get("key", compute)


async def test_a_repeated_run_is_answered_from_memory() -> None:
    runs = Runs(PASSED)
    await twice(runs)
    assert runs.count == 1


async def test_a_run_that_changed_its_workspace_stands_for_itself_only() -> None:
    runs = Runs(PASSED, is_general=False)
    await twice(runs)
    assert runs.count == 2


async def test_what_ran_out_of_time_or_memory_is_tried_again() -> None:
    for outcome in (
        CommandOutcome(output=b"", exit_code=143, timed_out=True),
        CommandOutcome(output=b"", exit_code=137, ended_for="memory"),
        CommandOutcome(output=b"x" * (MAX_ENTRY_BYTES + 1), exit_code=0),
    ):
        runs = Runs(outcome)
        await twice(runs)
        assert runs.count == 2


async def test_runs_at_the_same_time_share_one_execution() -> None:
    cache, runs = ResultCache(), Runs(PASSED)
    runs.go.clear()
    tasks = [asyncio.create_task(cache.get("key", runs)) for _ in range(5)]
    await asyncio.sleep(0)
    runs.go.set()

    assert await asyncio.gather(*tasks) == [PASSED] * 5
    assert runs.count == 1


async def test_who_waited_for_a_run_that_was_given_up_runs_for_itself() -> None:
    cache, first, second = ResultCache(), Runs(PASSED), Runs(PASSED)
    first.go.clear()
    one = asyncio.create_task(cache.get("key", first))
    await asyncio.sleep(0)
    other = asyncio.create_task(cache.get("key", second))
    await asyncio.sleep(0)
    one.cancel()

    assert await other == PASSED
    assert (first.count, second.count) == (1, 1)


async def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    cache, runs = ResultCache(max_entries=2), Runs(PASSED)
    for key in ("a", "b", "a", "c", "a", "b"):
        await cache.get(key, runs)

    assert runs.count == 4
