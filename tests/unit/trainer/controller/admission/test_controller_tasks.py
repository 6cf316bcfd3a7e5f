"""The order of tasks: a permutation that depends on the seed alone."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.blobs import MemoryStore, open_store
from etude.common.errors import UserError
from etude.trainer.controller.admission.tasks import TaskOrder
from etude.trainer.rollouts import tasks
from etude.trainer.seeding import derive_seed, permute_index


@given(size=st.integers(1, 400), seed=st.integers(0, 2**31 - 1))
def test_the_order_takes_every_task_exactly_once(size: int, seed: int) -> None:
    places = [permute_index(i, size=size, seed=seed) for i in range(size)]
    assert sorted(places) == list(range(size))


def test_the_same_seed_gives_the_same_order_and_another_seed_another_one() -> None:
    first = [permute_index(i, size=100, seed=7) for i in range(100)]
    assert first == [permute_index(i, size=100, seed=7) for i in range(100)]
    assert first != [permute_index(i, size=100, seed=8) for i in range(100)]
    assert first != list(range(100))


def test_the_order_is_fixed_across_releases() -> None:
    # A resumed run must go on in the order that an older release began.
    assert [permute_index(i, size=10, seed=3) for i in range(10)] == [3, 1, 8, 4, 5, 0, 9, 2, 7, 6]


def test_a_position_outside_the_order_is_refused() -> None:
    with pytest.raises(ValueError, match="outside"):
        permute_index(10, size=10, seed=0)


def test_seeds_of_different_purposes_differ_and_stay_positive() -> None:
    seeds = {derive_seed(1, "rl", i) for i in range(1000)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_tasks_are_the_folders_with_a_task_file() -> None:
    store = MemoryStore("file:///tasks")
    for folder in "ba":
        store.put(f"{folder}/task.toml", b"")
        store.put(f"{folder}/instruction.md", b"Fix add.")
    for key in ("a/environment/x.py", "c/readme.md", "task.toml"):
        store.put(key, b"")
    found = tasks.find_tasks(store, name="train", environment="repos")
    assert [task.task_id for task in found] == ["train/a", "train/b"]
    assert found[0].uri == "file:///tasks/a"


def test_tasks_of_a_folder_are_found_beside_what_is_no_task(tmp_path: Path) -> None:
    for folder in ("b", "a", "a.b"):
        (tmp_path / folder / "environment" / "deep").mkdir(parents=True)
        (tmp_path / folder / "task.toml").touch()
        (tmp_path / folder / "instruction.md").write_text("Fix add.")
    (tmp_path / "empty").mkdir()
    (tmp_path / "mining.jsonl").touch()
    found = tasks.find_tasks(open_store(tmp_path.as_uri()), name="train", environment="repos")
    assert [task.task_id for task in found] == ["train/a", "train/a.b", "train/b"]


def test_an_empty_task_set_names_itself_and_the_way_out() -> None:
    with pytest.raises(UserError, match=r"train.*\n.*etude tasks generate"):
        tasks.find_tasks(MemoryStore(), name="train", environment="repos")


def test_a_task_without_an_instruction_is_named() -> None:
    store = MemoryStore("file:///tasks")
    store.put("a/task.toml", b"")
    with pytest.raises(UserError, match=r"file:///tasks/a  holds .* no instruction.md"):
        tasks.find_tasks(store, name="train", environment="repos")


def test_a_task_that_comes_twice_is_refused() -> None:
    task = tasks.Task(task_id="t", uri="file:///t", environment="repos")
    with pytest.raises(ValueError, match="twice"):
        TaskOrder(tasks=(task, task), seed=0)
