"""Recorded experts of one request: each position once, by the pass that gave the next token."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from etude.common.routed_experts import ExpertIds
from etude.inference.worker.route_recorder import MAX_ENDED, RequestRoutes, find_dropped


def ids(*values: int) -> ExpertIds:
    found: ExpertIds = np.array(values, dtype=np.uint8).reshape(-1, 1, 1)
    return found


def read(routes: RequestRoutes, start: int) -> list[int]:
    found = routes.read(start)
    return [] if found is None else found.ravel().tolist()


def test_passes_follow_each_other_from_the_first_position_that_is_asked_for() -> None:
    routes = RequestRoutes(3, 0)
    routes.append(ids(0, 1))  # cached
    routes.add(ids(2, 3, 4), known=2, settled=4)
    routes.add(ids(5), known=5, settled=5)
    assert read(routes, 3) == [3, 4, 5]
    assert read(routes, 6) == []
    routes.add(ids(6), known=6, settled=6)
    assert read(routes, 6) == [6]


def test_guesses_that_were_wrong_are_replaced() -> None:
    routes = RequestRoutes(0, 0)
    routes.add(ids(0, 1, 2), known=0, settled=2)
    routes.add(ids(3, 40, 50), known=3, settled=3)
    routes.add(ids(4, 5, 6), known=4, settled=4)
    assert read(routes, 0) == [0, 1, 2, 3, 4, 5, 6]


def test_a_request_that_starts_again_keeps_the_experts_that_gave_its_tokens() -> None:
    routes = RequestRoutes(2, 0)
    routes.add(ids(0, 1, 2, 3), known=0, settled=3)
    assert read(routes, 2) == [2, 3]
    routes.add(ids(4), known=4, settled=4)
    # The last token has not been processed yet; passes over the others change nothing.
    routes.add(ids(10, 11), known=0, settled=5)
    routes.add(ids(12, 13, 14, 15), known=2, settled=5)
    assert read(routes, 4) == [4, 15]
    routes.add(ids(6), known=6, settled=6)
    assert read(routes, 6) == [6]


def test_guesses_before_a_request_starts_again_keep_no_experts_of_wrong_ones() -> None:
    routes = RequestRoutes(0, 0)
    routes.add(ids(0, 1), known=0, settled=1)
    routes.add(ids(2, 3, 40), known=2, settled=2)  # one of two guesses was right
    routes.add(ids(10, 11, 12, 13, 4), known=0, settled=4)
    assert read(routes, 0) == [0, 1, 2, 3, 4]


@given(ended=st.integers(0, 2 * MAX_ENDED), running=st.integers(0, 2 * MAX_ENDED))
def test_only_the_oldest_ended_requests_above_the_limit_are_dropped(
    ended: int, running: int
) -> None:
    names = [f"ended-{number}" for number in range(ended)]
    at_work = {f"running-{number}" for number in range(running)}
    dropped = find_dropped([*at_work, *names], at_work)
    assert dropped == names[: len(dropped)]
    assert len(dropped) == max(0, ended - MAX_ENDED)
