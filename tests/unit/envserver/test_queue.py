"""Whose turn it is, and where it runs."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from etude.envserver.broker.placement import placement
from etude.envserver.broker.queue import Batch, BatchKey, Queue, Turn
from etude.v1 import environments_pb2


def batch(run: str, name: str, count: int) -> Batch:
    request = environments_pb2.LaunchBatchRequest(run_id=run, idempotency_key=name, count=count)
    return Batch(BatchKey(run, name), request, "digest", 0.0, 10.0, deque(range(count)))


def names(turns: list[Turn]) -> list[str]:
    return [f"{turn.batch.key.idempotency_key}{turn.position}" for turn in turns]


def test_inside_a_run_the_first_to_come_is_the_first_to_be_served() -> None:
    queue = Queue()
    queue.add(batch("r", "a", 2))
    queue.add(batch("r", "b", 2))

    assert names(queue.take(3)) == ["a0", "a1", "b0"]
    assert len(queue) == 1


def test_runs_take_turns_whatever_the_size_of_their_batches() -> None:
    queue = Queue()
    queue.add(batch("big", "a", 100))
    queue.add(batch("small", "b", 2))

    assert names(queue.take(5)) == ["a0", "b0", "a1", "b1", "a2"]


def test_an_environment_whose_node_failed_is_next() -> None:
    queue = Queue()
    queue.add(batch("r", "a", 3))
    first, second = queue.take(2)
    queue.put_back(second)
    queue.put_back(first)

    assert names(queue.take(9)) == ["a0", "a1", "a2"]


def test_a_batch_that_left_is_not_served() -> None:
    queue = Queue()
    one, other = batch("r", "a", 3), batch("r", "b", 1)
    queue.add(one)
    queue.add(other)
    queue.take(1)

    assert queue.remove(one) == [1, 2]
    assert names(queue.take(9)) == ["b0"]
    assert len(queue) == 0


def test_a_batch_without_anybody_waiting_takes_no_place() -> None:
    queue = Queue()
    queue.add(batch("r", "a", 0))

    assert queue.take(1) == []


@given(st.lists(st.tuples(st.sampled_from("rst"), st.integers(1, 5)), max_size=8), st.data())
def test_everybody_is_served_exactly_once(
    asked: list[tuple[str, int]], data: st.DataObject
) -> None:
    queue = Queue()
    for number, (run, count) in enumerate(asked):
        queue.add(batch(run, f"{number}-", count))
    served: list[str] = []
    while len(queue):
        turns = queue.take(data.draw(st.integers(1, 4)))
        for turn in turns:
            if turn.batch.tries.get(turn.position, 0) == 0 and data.draw(st.booleans()):
                turn.batch.tries[turn.position] = 1
                queue.put_back(turn)
            else:
                served += names([turn])

    assert sorted(served) == sorted(f"{n}-{i}" for n, (_, c) in enumerate(asked) for i in range(c))


def test_environments_go_to_the_freest_nodes() -> None:
    assert placement(4, {"a": 1, "b": 4, "c": 2}) == {"b": 3, "c": 1}
    assert placement(9, {"a": 1, "b": 2}) == {"b": 2, "a": 1}
    assert placement(1, {"a": 0}) == {}
    assert placement(3, {}) == {}


@given(st.integers(0, 40), st.dictionaries(st.text("abc", min_size=1), st.integers(0, 9)))
def test_no_node_gets_more_than_it_has_room_for(count: int, free: dict[str, int]) -> None:
    placed = placement(count, free)

    assert sum(placed.values()) == min(count, sum(free.values()))
    assert all(0 < number <= free[node] for node, number in placed.items())
