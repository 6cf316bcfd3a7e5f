"""Choice of tasks: a curriculum trains each at most once, and a resume goes on in its order."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.installed_package import install_package

from etude.common.api.run.curriculum import CurriculumChoice, SolveRateBand
from etude.common.errors import UserError
from etude.trainer.controller.admission.task_choice import (
    CurriculumError,
    TaskChoice,
    open_choice,
)
from etude.trainer.controller.admission.tasks import TaskOrder, UsedTasks
from etude.trainer.curricula.base import Curriculum, CurriculumView
from etude.trainer.rollouts.tasks import Task
from etude.trainer.seeding import derive_seed

AT = "spec.phases[0].curriculum"
PAGE = Path(__file__).parents[5] / "docs" / "how-to" / "extend" / "curriculum.md"


@dataclass
class Admitted:
    consumed: dict[str, None] = field(default_factory=dict)
    results: dict[str, float] = field(default_factory=dict)


def make_order(size: int, seed: int = 3) -> TaskOrder:
    levels = ("easy", "medium", "hard")
    tasks = (
        Task(task_id=f"s/{i}", uri="file:///t", environment="e", label=levels[i % 3])
        for i in range(size)
    )
    return TaskOrder(tasks=tuple(tasks), seed=seed)


def arbitrary(salt: int) -> Curriculum:
    """A curriculum that names some tasks in an order that all facts change."""

    def order(view: CurriculumView, _parameters: SolveRateBand) -> list[str]:
        facts = repr(view)
        ranked = sorted(view.untrained, key=lambda task: derive_seed(salt, facts, task.task_id))
        return [task.task_id for task in ranked[: len(ranked) * 2 // 3]]

    return Curriculum(parameters=SolveRateBand, order=order)


def choice_of(curriculum: Curriculum | None, order: TaskOrder) -> TaskChoice:
    return TaskChoice(order=order, field_path=AT, curriculum=curriculum, parameters=SolveRateBand())


def train(
    make: Callable[[], TaskChoice], rewards: Callable[[str], float], restarts: Iterator[int]
) -> list[str]:
    """Admit three tasks at a time and train the first two of them, over and over."""
    admitted, live, choice = Admitted(), list[str](), make()
    while True:
        while len(live) < 3:
            if next(restarts):
                choice = make()
            position = choice.next_position(admitted)
            if position is None:
                return list(admitted.consumed)
            task_id = choice.order.task_at(position).task_id
            assert task_id not in admitted.consumed
            assert choice.upcoming(admitted, 1)[0].task_id == task_id
            admitted.consumed[task_id] = None
            live.append(task_id)
        for task_id in live[:2]:
            admitted.results[task_id] = rewards(task_id)
        del live[:2]


@given(st.integers(1, 24), st.integers(0, 99), st.data())
def test_any_curriculum_trains_each_task_once_and_resumes_in_the_same_order(
    size: int, salt: int, data: st.DataObject
) -> None:
    order = make_order(size, seed=salt)

    def make() -> TaskChoice:
        return choice_of(arbitrary(salt), order)

    def reward(task_id: str) -> float:
        return derive_seed(salt, task_id) % 5 / 4

    whole = train(make, reward, repeat(0))
    assert sorted(whole) == sorted(order.ids())
    restarts = data.draw(st.lists(st.integers(0, 1), min_size=2 * size + 2, max_size=2 * size + 2))
    assert train(make, reward, iter(restarts)) == whole


def test_without_a_curriculum_tasks_come_in_the_order_of_the_seed() -> None:
    order = make_order(17)
    made = train(lambda: choice_of(None, order), lambda _: 0.5, repeat(0))
    assert made == list(order.ids())


@pytest.mark.parametrize("curriculum", [None, arbitrary(7)])
@pytest.mark.parametrize(("count", "size"), [(4, 4), (100, 17), (0, 0), (-1, 0)], ids=str)
def test_upcoming_tasks_are_the_next_ones_without_those_under_way(
    curriculum: Curriculum | None, count: int, size: int
) -> None:
    choice, admitted = choice_of(curriculum, make_order(20)), Admitted()
    first = [task.task_id for task in choice.upcoming(admitted, 20)]
    assert sorted(first) == sorted(choice.order.ids())
    admitted.consumed |= dict.fromkeys((first[0], first[5], first[19]))
    left = [*first[1:5], *first[6:19]]
    assert [task.task_id for task in choice.upcoming(admitted, count)] == left[:size]
    admitted.consumed |= dict.fromkeys(first)
    assert choice.upcoming(admitted, 4) == []


def test_labels_that_are_solved_half_of_the_time_come_first() -> None:
    order = make_order(12)
    choice = open_choice(order, CurriculumChoice(name="SolveRateBand"), at=AT)
    results = {"s/0": 1.0, "s/1": 0.5, "s/4": 0.25, "s/2": 0.0}
    admitted = Admitted(dict.fromkeys(results), results)
    labels = [task.label for task in choice.upcoming(admitted, 12)]
    assert labels[:2] == ["medium"] * 2
    assert len(labels) == 8


@pytest.mark.parametrize(
    ("named", "problem"),
    [
        (lambda _: ["s/0"], "names task 's/0', which is trained already"),
        (lambda _: ["s/99"], "names task 's/99', which is none of the phase"),
        (lambda _: [[]], r"names task \[\], which is none of the phase"),
        (lambda _: ["s/1", "s/1"], "names task 's/1' twice"),
        (lambda _: repeat("s/1"), "names task 's/1' twice"),
        (lambda _: None, "raised TypeError"),
        (lambda _: 1 // 0, "raised ZeroDivisionError"),
    ],
)
def test_a_faulty_curriculum_stops_the_run_with_its_field(
    named: Callable[[CurriculumView], Iterable[Any]], problem: str
) -> None:
    curriculum = Curriculum(parameters=SolveRateBand, order=lambda view, _: named(view))
    choice = choice_of(curriculum, make_order(3))
    with pytest.raises(
        CurriculumError, match=rf"spec\.phases\[0\]\.curriculum: the curriculum {problem}"
    ):
        choice.next_position(Admitted({"s/0": None}, {"s/0": 1.0}))


def test_the_curriculum_of_the_page_orders_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    entries = {"etude.curricula": {"acme.Ladder": "acme_ladder:LADDER"}}
    install_package(tmp_path, monkeypatch, name="acme_ladder", source=source, entries=entries)
    chosen = CurriculumChoice(name="acme.Ladder", parameters={"steps": ["easy", "hard"]})
    choice = open_choice(make_order(9), chosen, at=AT)
    admitted = Admitted()
    assert [task.label for task in choice.upcoming(admitted, 3)] == ["easy"] * 3
    admitted.consumed["s/0"], admitted.results["s/0"] = None, 1.0
    assert [task.label for task in choice.upcoming(admitted, 3)] == ["hard"] * 3
    with pytest.raises(UserError, match=r"parameters\.steps"):
        open_choice(make_order(9), CurriculumChoice(name="acme.Ladder"), at=AT)


def test_a_curriculum_that_is_not_installed_is_refused_with_its_field() -> None:
    with pytest.raises(UserError, match=r"spec\.phases\[0\]\.curriculum"):
        open_choice(make_order(3), CurriculumChoice(name="acme.Absent"), at=AT)


def test_a_later_phase_has_what_no_curriculum_can_have_used() -> None:
    used, order = UsedTasks(), make_order(10)
    used.add_phase(order, 4, is_ordered=False)
    assert used.count_left(order) == 6
    used.add_phase(order, 3, is_ordered=True)
    assert used.count_left(order) == 3
