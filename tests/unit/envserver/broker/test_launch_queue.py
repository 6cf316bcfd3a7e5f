"""Whose turn it is."""

from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.envserver.broker.launch_queue import (
    MOST_URGENT,
    QUANTUM_CPU_MS,
    BatchKey,
    LaunchBatch,
    LaunchQueue,
    Offer,
    Turn,
    urgency,
)
from etude.v1 import environments_pb2

COSTS = {"cheap": 2.0, "python": 50.0, "dear": 2_400.0}


def batch(
    run: str, name: str, count: int, template: str = "python", due_s: float | None = None
) -> LaunchBatch:
    request = environments_pb2.LaunchBatchRequest(
        run_id=run, idempotency_key=name, count=count, template=template
    )
    made = LaunchBatch(BatchKey(run, name), request, "digest", 0.0, 10.0, deque(range(count)))
    made.due_s = due_s
    return made


def offered(each: LaunchBatch) -> Offer:
    return Offer("node", COSTS[each.placement_class.template])


def take(
    queue: LaunchQueue, count: int, offers: Callable[[LaunchBatch], Offer | None] = offered
) -> list[Turn]:
    """So many turns; after them nothing is free any more."""
    left = count

    def limited(each: LaunchBatch) -> Offer | None:
        return offers(each) if left else None

    turns = []
    for turn in queue.take(limited, now_s=0.0):
        turns.append(turn)
        left -= 1
    return turns


def names(turns: list[Turn]) -> list[str]:
    return [f"{turn.batch.key.idempotency_key}{turn.position}" for turn in turns]


def runs(turns: list[Turn]) -> str:
    return "".join(turn.batch.key.run_id for turn in turns)


def test_inside_a_run_the_first_to_come_is_the_first_to_be_served() -> None:
    queue = LaunchQueue()
    queue.add(batch("r", "a", 2))
    queue.add(batch("r", "b", 2))

    assert names(take(queue, 3)) == ["a0", "a1", "b0"]
    assert len(queue) == 1


def test_runs_take_turns_of_one_quantum_whatever_the_size_of_their_batches() -> None:
    queue = LaunchQueue()
    queue.add(batch("b", "a", 100))
    queue.add(batch("s", "b", 6))
    each = round(QUANTUM_CPU_MS / COSTS["python"])

    assert runs(take(queue, 3 * each)) == "b" * each + "s" * each + "b" * each


def test_a_visit_that_was_cut_short_goes_on() -> None:
    queue = LaunchQueue()
    queue.add(batch("b", "a", 100))
    queue.add(batch("s", "b", 100))

    assert "".join(runs(take(queue, 1)) for _ in range(10)) == "bbbbssssbb"


def test_cheap_starts_come_in_greater_numbers() -> None:
    queue = LaunchQueue()
    queue.add(batch("c", "a", 500, "cheap"))
    queue.add(batch("p", "b", 500))

    served = runs(take(queue, 208))

    assert (served.count("c"), served.count("p")) == (200, 8)


def test_a_start_that_costs_more_than_a_quantum_waits_for_several_visits() -> None:
    queue = LaunchQueue()
    queue.add(batch("d", "a", 1, "dear"))
    queue.add(batch("p", "b", 100))

    served = runs(take(queue, 100))

    # Twelve visits of 200 ms each, before each of which the other run is served four times.
    assert served.index("d") == 44


def test_batches_of_one_template_go_together_but_do_not_starve_another_template() -> None:
    queue = LaunchQueue()
    queue.add(batch("r", "a", 2))
    queue.add(batch("r", "b", 2, "cheap"))
    queue.add(batch("r", "c", 2))
    first = take(queue, 1)
    queue.add(batch("r", "d", 2))

    assert names(first + take(queue, 7)) == ["a0", "a1", "c0", "c1", "b0", "b1", "d0", "d1"]


def test_a_template_without_room_holds_up_neither_other_templates_nor_other_runs() -> None:
    queue = LaunchQueue()
    queue.add(batch("r", "a", 1))
    queue.add(batch("r", "b", 1, "cheap"))
    queue.add(batch("s", "c", 1, "cheap"))

    def no_python(each: LaunchBatch) -> Offer | None:
        return None if each.placement_class.template == "python" else offered(each)

    assert names(take(queue, 9, no_python)) == ["b0", "c0"]
    assert names(take(queue, 9)) == ["a0"]


def test_an_environment_whose_host_failed_is_next_and_is_not_paid_twice() -> None:
    queue = LaunchQueue()
    queue.add(batch("r", "a", 4))
    queue.add(batch("s", "b", 4))
    turns = take(queue, 2)
    for turn in reversed(turns):
        queue.requeue(turn)

    assert names(take(queue, 8)) == ["a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3"]


def test_a_batch_that_left_is_not_served() -> None:
    queue = LaunchQueue()
    one, other = batch("r", "a", 3), batch("r", "b", 1)
    queue.add(one)
    queue.add(other)
    take(queue, 1)

    assert queue.remove(one) == [1, 2]
    assert names(take(queue, 9)) == ["b0"]
    assert len(queue) == 0
    assert list(queue.batches()) == []


def test_a_batch_without_anybody_waiting_takes_no_place() -> None:
    queue = LaunchQueue()
    queue.add(batch("r", "a", 0))

    assert take(queue, 1) == []


@pytest.mark.parametrize(
    ("due_s", "times"), [(None, 1.0), (0.0, 4.0), (5.0, 4.0), (7.0, 3.5), (10.0, 2.0), (1e9, 1.0)]
)
def test_a_run_gets_more_the_less_time_it_has_left(due_s: float | None, times: float) -> None:
    assert urgency(batch("r", "a", 1, due_s=due_s), now_s=5.0) == pytest.approx(times)
    assert urgency(batch("r", "a", 1, due_s=due_s), now_s=5.0) <= MOST_URGENT


def test_a_late_run_is_served_four_times_as_much() -> None:
    queue = LaunchQueue()
    queue.add(batch("l", "a", 500, due_s=-1.0))
    queue.add(batch("p", "b", 500))

    served = runs(take(queue, 200))

    assert served.count("l") == 4 * served.count("p")


@settings(deadline=None)  # neighbours may hold both cores
@given(
    st.lists(
        st.tuples(st.sampled_from("rst"), st.integers(1, 5), st.sampled_from(sorted(COSTS))),
        max_size=8,
    ),
    st.data(),
)
def test_everybody_is_served_exactly_once(
    asked: list[tuple[str, int, str]], data: st.DataObject
) -> None:
    queue = LaunchQueue()
    for number, (run, count, template) in enumerate(asked):
        queue.add(batch(run, f"{number}-", count, template))
    served: list[str] = []
    while len(queue):
        turns = take(queue, data.draw(st.integers(1, 4)))
        for turn in turns:
            if turn.batch.tries.get(turn.position, 0) == 0 and data.draw(st.booleans()):
                turn.batch.tries[turn.position] = 1
                queue.requeue(turn)
            else:
                served += names([turn])

    assert sorted(served) == sorted(
        f"{n}-{i}" for n, (_, c, _) in enumerate(asked) for i in range(c)
    )
    assert list(queue.batches()) == []
