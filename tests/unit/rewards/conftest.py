"""A task folder, rollouts, and diffs for reward tests."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from etude.common.harbor import task as harbor_task
from etude.rewards.grading import GradingJob
from etude.v1 import environments_pb2, rollout_pb2


@pytest.fixture
def task_folder(tmp_path: Path) -> Path:
    files = {
        "task.toml": 'schema_version = "1.1"\n[verifier]\ntimeout_sec = 5.0\n',
        "instruction.md": "Fix it.\n",
        "environment/code.py": "x = 1\n",
        "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
    }
    for path, text in files.items():
        target = tmp_path / "task-1" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return tmp_path / "task-1"


@pytest.fixture
def job(task_folder: Path) -> GradingJob:
    task = harbor_task.read_task(task_folder)
    return GradingJob(task, task_folder.as_uri(), "repos", task.tests(), 5.0, time.monotonic() + 60)


@pytest.fixture
def rollout() -> Callable[..., rollout_pb2.Rollout]:
    def make(
        text: str = "",
        ending: rollout_pb2.Ending = rollout_pb2.ENDING_STOPPED,
        costs: rollout_pb2.Costs | None = None,
    ) -> rollout_pb2.Rollout:
        diff = environments_pb2.WorkspaceDiff()
        if text:
            diff.written.add(path="code.py", content=text.encode())
        return rollout_pb2.Rollout(
            rollout_id=f"r-{text}-{ending}",
            diff=diff.SerializeToString(),
            ending=ending,
            costs=costs,
        )

    return make
