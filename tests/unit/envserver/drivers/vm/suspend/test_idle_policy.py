"""When a guest that nobody calls stands still."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from etude.envserver.drivers.vm.suspend.idle_policy import (
    DueStep,
    Idleness,
    IdleTimeouts,
    PowerState,
    PowerStep,
)

PATIENCE = IdleTimeouts()
STILL = {PowerState.FROZEN, PowerState.SAVED}
settled = st.sampled_from([PowerState.RUNNING, PowerState.FROZEN, PowerState.SAVED])
times = st.floats(0, 1e5)


@st.composite
def idlenesses(draw: st.DrawFn) -> Idleness:
    return Idleness(
        state=draw(st.sampled_from([*PowerState])),
        num_calls=draw(st.integers(0, 3)),
        num_jobs=draw(st.integers(0, 2)),
        last_call_s=draw(times),
        frozen_s=draw(times),
        stopped_s=draw(times),
    )


@given(idlenesses(), times)
def test_a_guest_in_a_call_is_never_stopped_and_one_that_is_called_is_woken(
    seen: Idleness, now_s: float
) -> None:
    called = replace(seen, num_calls=max(1, seen.num_calls))
    step = called.next_step(PATIENCE, now_s=now_s).step
    expected = {PowerState.FROZEN: PowerStep.THAW, PowerState.SAVED: PowerStep.RESTORE}
    assert step is expected.get(called.state)


@given(idlenesses(), times)
def test_nothing_is_done_twice_at_a_time_nor_after_the_end(seen: Idleness, now_s: float) -> None:
    if seen.state not in {PowerState.RUNNING, *STILL}:
        assert seen.next_step(PATIENCE, now_s=now_s) == DueStep()


@given(settled, st.integers(0, 2), times, times)
def test_a_guest_that_nobody_calls_ends_on_the_disk(
    state: PowerState, num_jobs: int, quiet_s: float, now_s: float
) -> None:
    seen = Idleness(state=state, num_jobs=num_jobs, last_call_s=quiet_s)
    steps, asked = [], 0
    while (due := seen.next_step(PATIENCE, now_s=now_s)) != DueStep():
        asked += 1
        assert asked < 10
        if due.step is not None:
            steps.append(due.step)
            seen = seen.begin_step(due.step).complete_step(due.step, now_s=now_s)
        else:
            assert due.again_s is not None
            # Rounding may put the very moment on either side.
            now_s += due.again_s + 1e-6
    assert seen.state is PowerState.SAVED
    assert steps == [PowerStep.FREEZE, PowerStep.SAVE][2 - len(steps) :]


def test_the_limits_are_those_that_were_promised() -> None:
    seen = Idleness(last_call_s=100.0)
    assert seen.next_step(PATIENCE, now_s=100.049).step is None
    assert seen.next_step(PATIENCE, now_s=100.051).step is PowerStep.FREEZE
    with_job = replace(seen, num_jobs=1)
    assert with_job.next_step(PATIENCE, now_s=159.9).step is None
    assert with_job.next_step(PATIENCE, now_s=160.1).step is PowerStep.FREEZE
    frozen = seen.begin_step(PowerStep.FREEZE).complete_step(PowerStep.FREEZE, now_s=200.0)
    assert frozen.next_step(PATIENCE, now_s=259.9).step is None
    assert frozen.next_step(PATIENCE, now_s=260.1).step is PowerStep.SAVE


@given(settled, times)
def test_what_is_lost_by_a_failure_is_what_was_in_memory_alone(
    state: PowerState, now_s: float
) -> None:
    after = {
        PowerStep.FREEZE: PowerState.ENDED,
        PowerStep.THAW: PowerState.ENDED,
        PowerStep.SAVE: PowerState.FROZEN,
        PowerStep.RESTORE: PowerState.SAVED,
    }
    for step, expected in after.items():
        failed = Idleness(state=state).begin_step(step).fail_step(step, now_s=now_s)
        assert failed.state is expected
    # A save that failed is not tried again at once.
    failed = (
        Idleness(state=PowerState.FROZEN)
        .begin_step(PowerStep.SAVE)
        .fail_step(PowerStep.SAVE, now_s=now_s)
    )
    assert failed.next_step(PATIENCE, now_s=now_s).step is None


def test_a_guest_that_was_woken_for_somebody_who_left_is_given_time_before_it_stops() -> None:
    seen = Idleness(state=PowerState.SAVED, last_call_s=0.0).begin_call()
    seen = (
        seen.begin_step(PowerStep.RESTORE)
        .end_call(now_s=1.0)
        .complete_step(PowerStep.RESTORE, now_s=5.0)
    )
    assert seen.next_step(PATIENCE, now_s=5.0).step is None
    assert seen.next_step(PATIENCE, now_s=5.1).step is PowerStep.FREEZE
