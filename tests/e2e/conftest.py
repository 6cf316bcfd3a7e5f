"""Whole runs on this machine, as a user starts them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from etude.common.run_folder.lock import runtime_pid
from etude.common.run_folder.record import FolderRecord
from etude.common.run_folder.state import LocalState, read_state

DEADLINE_S = 1_500
"""Two and a half times the demo's own budget, for a machine that does other things too."""


@dataclass
class Demo:
    """One demo in a folder of its own."""

    folder: Path
    seed: int = 0
    process: subprocess.Popen[str] | None = None
    killed: list[int] = field(default_factory=list)

    def start(self, *arguments: str) -> None:
        code = "from etude.cli.main import main; main()"
        command = [sys.executable, "-c", code, "demo", "--plain", "--seed", str(self.seed)]
        self.process = subprocess.Popen(
            [*command, "--dir", str(self.folder), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self) -> tuple[int, str]:
        """Exit code and everything it printed."""
        assert self.process is not None
        output, _ = self.process.communicate(timeout=DEADLINE_S)
        print(output)  # noqa: T201 - the figures belong into the test's log
        return self.process.returncode, output

    def state(self) -> LocalState:
        state = read_state(self.folder)
        assert state is not None
        return state

    def rl_steps(self) -> list[int]:
        """RL steps in the order in which they were recorded."""
        rows = FolderRecord(self.folder).rows()
        return [r["step"] for r in rows if r["kind"] == "step" and "reward_mean" in r]

    def await_rl_step(self, step: int) -> None:
        """Return once reinforcement learning has finished that many steps.

        Raises:
            TimeoutError: it took longer than any machine should need.
        """
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            assert self.process is not None
            assert self.process.poll() is None, "the demo ended early"
            if max(self.rl_steps(), default=0) >= step:
                return
            time.sleep(0.5)
        raise TimeoutError(f"no RL step {step} in {DEADLINE_S} s")

    def kill(self, part: str) -> None:
        """Kill -9 the process of the pod whose name holds this."""
        pod = next(p for p in self.state().pods if part in p.name)
        assert pod.pid is not None
        self.killed.append(pod.pid)
        subprocess.run(["kill", "-9", str(pod.pid)], check=True)

    def figures(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "demo.json").read_text())
        return found


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    running = Demo(tmp_path / "demo")
    yield running
    if (pid := runtime_pid(running.folder)) is not None:
        os.kill(pid, signal.SIGKILL)
    if running.process is not None and running.process.poll() is None:
        running.process.kill()
