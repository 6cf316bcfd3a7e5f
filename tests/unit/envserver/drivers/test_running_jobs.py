"""Which background commands of a guest run."""

from hypothesis import given
from hypothesis import strategies as st

from etude.envserver.drivers.running_jobs import RunningJobs
from etude.v1 import guest_pb2

START = guest_pb2.GuestCall(exec=guest_pb2.GuestExec(shell=b"sleep 9", background=True))


def started(number: int) -> guest_pb2.GuestResult:
    return guest_pb2.GuestResult(exec=guest_pb2.GuestExecResult(job=number, is_running=True))


def ended(number: int) -> guest_pb2.GuestEvent:
    return guest_pb2.GuestEvent(job_exit=guest_pb2.GuestJobExit(job=number))


def test_a_command_runs_from_its_answer_to_its_end() -> None:
    jobs = RunningJobs()
    with jobs.span_call(START):
        jobs.add_answer(START, started(1))
    assert jobs.running == {1}
    jobs.add_event(ended(1))
    assert jobs.running == set()


def test_a_command_that_ended_before_it_was_answered_does_not_run() -> None:
    jobs = RunningJobs()
    with jobs.span_call(START):
        jobs.add_event(ended(1))
        jobs.add_answer(START, started(1))
    assert jobs.running == set()


def test_an_end_that_a_look_at_the_command_shows_counts_too() -> None:
    jobs = RunningJobs([4, 5])
    look = guest_pb2.GuestCall(job=guest_pb2.GuestJob(job=4))
    jobs.add_answer(look, started(4))
    assert jobs.running == {4, 5}
    jobs.add_answer(look, guest_pb2.GuestResult(status=guest_pb2.GUEST_STATUS_NOT_FOUND))
    assert jobs.running == {4, 5}
    over = guest_pb2.GuestResult(exec=guest_pb2.GuestExecResult(job=4))
    jobs.add_answer(look, over)
    assert jobs.running == {5}


def test_a_command_in_the_foreground_is_none() -> None:
    jobs = RunningJobs()
    call = guest_pb2.GuestCall(exec=guest_pb2.GuestExec(shell=b"true"))
    with jobs.span_call(call):
        jobs.add_answer(call, guest_pb2.GuestResult(exec=guest_pb2.GuestExecResult(exit_code=0)))
    assert jobs.running == set()


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_a_guest_that_tells_much_fills_no_memory(numbers: list[int]) -> None:
    jobs = RunningJobs()
    with jobs.span_call(START):
        for number in [*numbers, *range(10_000)]:
            jobs.add_event(ended(number))
        assert len(jobs._ended) <= 256
    assert len(jobs._ended) == 0
