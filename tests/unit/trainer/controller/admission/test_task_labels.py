"""Labels of tasks, from task.toml files that others wrote."""

from pathlib import Path

import pytest

from etude.common.api.storage import StoreAccess
from etude.common.errors import UserError
from etude.trainer.controller.admission.task_labels import LARGEST_FILE, label_tasks
from etude.trainer.rollouts.tasks import Task


def make_task(folder: Path, text: str) -> Task:
    (folder / "task.toml").write_text(text)
    return Task(task_id="s/t", uri=folder.as_uri(), environment="repos")


@pytest.mark.parametrize(
    ("text", "label"),
    [('[metadata]\ndifficulty = "hard"\n', "hard"), ("[metadata]\n", ""), ("", "")],
)
def test_a_label_is_the_difficulty_of_the_task(tmp_path: Path, text: str, label: str) -> None:
    (task,) = label_tasks([make_task(tmp_path, text)], StoreAccess())
    assert task.label == label


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[metadata", "is no TOML"),
        ("a = " + "[" * 10_000, "is no TOML"),
        ("[metadata]\ndifficulty = 3\n", "no text of up to 64 characters"),
        (f'[metadata]\ndifficulty = "{"a" * 65}"\n', "no text of up to 64 characters"),
        ("#" * (LARGEST_FILE + 1), "more than"),
    ],
)
def test_a_file_with_a_bad_label_is_named(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem) as refused:
        label_tasks([make_task(tmp_path, text)], StoreAccess())
    assert refused.value.problem.where.endswith("task.toml")
