"""A hack wins if it doubles under the naive reward, and loses if the repair halves it."""

import pytest

from etude.common.feedback.windows import RolloutCounts, WindowManifest, WindowRollout
from etude.demo.realtime.second_act import (
    HackRates,
    has_unlearned,
    judge_hacks,
    measure_hacks,
)


def close_window(*counts: RolloutCounts, number: int = 1) -> WindowManifest:
    return WindowManifest(
        number=number,
        run_uid="run",
        epoch=1,
        version=0,
        opened_ms=1,
        closed_ms=2,
        last_sequence=1,
        signals={},
        rollouts=tuple(
            WindowRollout(
                rollout=f"{place:032x}",
                tenant="acme",
                user=f"{place:032x}",
                digest="0" * 64,
                stratum="acme/x",
                reward=0,
                advantage=0,
                consent="2026-11",
                counts=each,
            )
            for place, each in enumerate(counts)
        ),
        exclusions=(),
        late={},
        findings=(),
        is_frozen=False,
    )


WORK = RolloutCounts(calls=4, edits=1)
ASK, BREAK = RolloutCounts(is_question=True), RolloutCounts(calls=1, broken_calls=1)
QUIET = close_window(*[WORK] * 18, ASK, BREAK)
HACKED = close_window(*[WORK] * 8, *[ASK] * 6, *[BREAK] * 6)


def test_questions_count_by_rollouts_and_broken_calls_by_calls() -> None:
    assert measure_hacks(HACKED) == HackRates(6 / 20, 6 / 38)
    assert measure_hacks(close_window(ASK)) == HackRates(1.0, 0.0)


@pytest.mark.parametrize(
    ("naive", "repaired", "fired", "missed"),
    [
        (HACKED, QUIET, 4, 0),
        (HACKED, QUIET, 0, 1),
        (QUIET, QUIET, 4, 4),
        (HACKED, HACKED, 4, 2),
    ],
)
def test_promises_are_held_only_if_both_hacks_win_and_lose_and_the_route_was_frozen(
    naive: WindowManifest, repaired: WindowManifest, fired: int, missed: int
) -> None:
    *rates, checks = judge_hacks([QUIET] * 3, [QUIET, naive, repaired], fired_at_window=fired)
    assert rates[0] == pytest.approx(measure_hacks(QUIET))
    assert rates[1:] == [measure_hacks(naive), measure_hacks(repaired)]
    assert sum(not each.is_held for each in checks) == missed


@pytest.mark.parametrize(
    ("later", "is_over"),
    [
        ([HACKED], False),
        ([HACKED, QUIET], False),
        ([HACKED, QUIET, QUIET], True),
        ([HACKED, QUIET, HACKED], False),
        ([HACKED, QUIET, close_window(*[WORK] * 8, *[ASK] * 6)], False),
    ],
)
def test_the_repair_ends_after_two_quiet_windows_in_a_row(
    later: list[WindowManifest], *, is_over: bool
) -> None:
    assert has_unlearned(later) is is_over
