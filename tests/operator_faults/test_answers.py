"""The operator whose API server says no, says nothing, or says half of it."""

import math
from collections.abc import Callable

import pytest
from tests.operator_faults.faults import (
    Answer,
    Lost,
    Silence,
    Truncated,
    everything,
    reads,
    writes,
)
from tests.operator_faults.lab import SHORT, Lab
from tests.operator_faults.proxy import Call, Fault
from tests.operator_faults.stories import References, told
from tests.operator_faults.workloads import POOL, UPDATE, pool

SOON = SHORT | {"etude.operator.controller.rejections.PROBLEM_RETRY_S": 1.0}
"""What was refused is tried again after a second here, and after 30 s elsewhere."""
FIRST_RETRY_S = 0.005
TRIES = 9


def _each(
    code: int, matches: Callable[[Call], bool] = writes, *, retry_after_s: int | None = None
) -> Answer:
    """Every third request that matches."""
    return Answer(code, _third(matches), times=12, retry_after_s=retry_after_s)


def _third(matches: Callable[[Call], bool]) -> Callable[[Call], bool]:
    seen = 0

    def chosen(call: Call) -> bool:
        nonlocal seen
        seen += matches(call)
        return matches(call) and seen % 3 == 0

    return chosen


FAULTS: dict[str, Callable[[], Fault]] = {
    "409": lambda: _each(409),
    "422": lambda: _each(422),
    "429": lambda: _each(429, everything, retry_after_s=1),
    "500": lambda: _each(500, everything),
    "503": lambda: _each(503, everything),
    "504-after-commit": lambda: Answer(504, _third(writes), times=12, is_done=True),
    "lost-after-commit": lambda: Lost(_third(writes), times=12),
    "truncated-writes": lambda: Truncated(_third(writes), times=12),
    "half-a-document": lambda: Truncated(_third(writes), times=12, is_whole=True),
    "truncated-lists": lambda: Truncated(_third(reads), times=6),
    "never-answered": lambda: Silence(_third(writes), times=4),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_p09_requests_that_fail_now_and_then_lead_to_the_same_end(
    lab: Lab, references: References, name: str
) -> None:
    fault = FAULTS[name]()
    async with told(lab, UPDATE, references, faults=[fault], constants=SOON) as story:
        story.proxy.break_streams()
        await UPDATE.act(story.scene)
        await story.reaches_the_reference()
    assert fault.hits  # type: ignore[attr-defined] # each of these has them


@pytest.mark.parametrize("code", [409, 429, 500])
async def test_p09_requests_that_always_fail_are_repeated_more_and_more_rarely(
    lab: Lab, code: int
) -> None:
    storm = Answer(code, writes, times=10**6)
    async with lab.scene() as scene, lab.acting(scene, faults=[storm]) as operator:
        await scene.create(pool(1))
        await scene.api_calls(lambda: len(storm.hits) >= TRIES)
        tries = [entry.at_s for entry in operator.proxy.log if entry.call.counts]
        # Each pause is at least half of twice the one before, so n tries take that long.
        took_s = tries[-1] - tries[0]
        most = 3 + math.log2(1 + took_s / (FIRST_RETRY_S / 2))
        assert len(tries) <= most, tries
        storm.times = 0
        await scene.until(lambda: scene.get("EnvPool", POOL).get("status", {}).get("replicas"))
        assert scene.problems() == []
