"""When a template that crashes is left alone, and when it is tried again."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.start.quarantine import (
    FIRST_S,
    LONGEST_S,
    THRESHOLD,
    QuarantinedError,
    StartQuarantine,
)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def crash(quarantine: StartQuarantine, times: int = 1) -> None:
    for _ in range(times):
        error = VmmError("the monitor ended with 1")
        error.add_note("Kernel panic: no init found")
        with pytest.raises(VmmError), quarantine.start("python"):
            raise error


def test_five_crashes_in_a_row_are_told_with_the_last_words() -> None:
    quarantine = StartQuarantine()
    crash(quarantine, THRESHOLD - 1)
    quarantine.check("python")
    crash(quarantine)
    with pytest.raises(QuarantinedError, match=r"5 starts failed.*ended with 1\nKernel panic"):
        quarantine.check("python")
    quarantine.check("another")


def test_a_success_between_crashes_counts_from_the_beginning() -> None:
    quarantine = StartQuarantine()
    crash(quarantine, THRESHOLD - 1)
    with quarantine.start("python"):
        pass
    crash(quarantine, THRESHOLD - 1)
    quarantine.check("python")


def test_one_trial_follows_and_its_success_ends_the_quarantine() -> None:
    clock = Clock()
    quarantine = StartQuarantine(clock=clock)
    crash(quarantine, THRESHOLD)
    clock.now_s = FIRST_S
    # Others wait for how it ends.
    with quarantine.start("python"), pytest.raises(QuarantinedError):
        quarantine.check("python")
    quarantine.check("python")
    crash(quarantine)
    quarantine.check("python")


def test_a_start_that_nobody_waits_for_any_more_is_no_crash() -> None:
    quarantine = StartQuarantine(threshold=1)
    with pytest.raises(KeyboardInterrupt), quarantine.start("python"):
        raise KeyboardInterrupt
    quarantine.check("python")


@given(st.integers(1, 30))
def test_trials_become_rarer_up_to_a_limit(trials: int) -> None:
    clock = Clock()
    quarantine = StartQuarantine(clock=clock)
    crash(quarantine, THRESHOLD)
    clock.now_s = FIRST_S
    for trial in range(1, trials + 1):
        crash(quarantine)
        wait_s = min(FIRST_S * 2**trial, LONGEST_S)
        clock.now_s += 0.99 * wait_s
        with pytest.raises(QuarantinedError):
            quarantine.check("python")
        clock.now_s += 0.01 * wait_s + 1e-6
    quarantine.check("python")


def test_crashes_of_one_burst_do_not_lengthen_the_quarantine() -> None:
    clock = Clock()
    quarantine = StartQuarantine(clock=clock)
    with contextlib.ExitStack() as burst:
        for _ in range(20):
            burst.enter_context(pytest.raises(VmmError))
            burst.enter_context(quarantine.start("python"))
            burst.push(lambda *_: raise_again())
    clock.now_s = FIRST_S
    quarantine.check("python")


def raise_again() -> bool:
    raise VmmError("the monitor ended")
