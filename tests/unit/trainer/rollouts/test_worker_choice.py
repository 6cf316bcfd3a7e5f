"""Siblings that are drawn again go to the worker of their group, unless it is busy."""

from hypothesis import given
from hypothesis import strategies as st

from etude.trainer.rollouts import worker_choice
from etude.trainer.rollouts.worker_choice import BUSY_RATIO, WorkerChoice, choose_worker

LOADS = st.lists(st.integers(0, 50), min_size=1, max_size=6)


def test_a_new_group_goes_to_the_least_loaded_worker() -> None:
    assert WorkerChoice().choose("g", [3, 1, 2]) == 1


def test_siblings_go_where_their_group_was_though_another_has_less_to_do() -> None:
    choice = WorkerChoice()
    assert choice.choose("g", [1, 2]) == 0
    assert choice.choose("g", [5, 4]) == 0
    assert choice.choose("h", [5, 4]) == 1
    assert choice.choose("g", [9, 4]) == 1, "it has more than 1.25 times the mean"


@given(loads=LOADS, last=st.none() | st.integers(0, 8))
def test_the_chosen_worker_has_the_least_load_or_is_the_groups_own(
    loads: list[int], last: int | None
) -> None:
    chosen = choose_worker(loads, last=last)
    is_own = chosen == last and loads[chosen] <= BUSY_RATIO * sum(loads) / len(loads)
    assert is_own or loads[chosen] == min(loads)


def test_workers_of_groups_that_ran_long_ago_are_forgotten() -> None:
    choice = WorkerChoice()
    for number in range(worker_choice.KEPT_GROUPS + 1):
        choice.choose(f"g{number}", [0, 1])
    assert choice.choose("g0", [1, 1]) == 0
    assert len(choice._last) == worker_choice.KEPT_GROUPS
