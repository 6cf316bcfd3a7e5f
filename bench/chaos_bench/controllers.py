"""Kills of real controllers, over a simulated learner and simulated rollouts."""

import asyncio
import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from controller_bench.run import RunShape, take_over, train_to_end
from tests.support.trainer_simulation.workers import SimulatedRollouts

from chaos_bench.counts import Counts
from chaos_bench.history import RunHistory, read_history
from etude.common.weights import VersionId
from etude.trainer.controller.run import Run

SHAPE = RunShape(
    prompts_per_step=2, group_size=3, staleness=0, steps=60, seed=5, steps_per_checkpoint=1
)
LONGEST_ROLLOUT_S = 0.05
LONGEST_LIFE_S = 1.5
"""Longest life of a controller that has taken its run over."""
START_S = 120.0
NAME = "controller, simulated partners"


async def run_controller(folder: Path) -> None:
    """Take a run over, say so, and train it to its end."""
    runs: list[Run] = []
    workers = SimulatedRollouts(
        lambda: runs[0].publishing.served or VersionId(0, 0), longest_s=LONGEST_ROLLOUT_S
    )
    opened = take_over(SHAPE, folder, workers)
    runs.append(opened.run)
    step = 0 if opened.checkpoint is None else opened.checkpoint.manifest.step
    print(json.dumps({"checkpoint_step": step}), flush=True)
    await train_to_end(opened.run, SHAPE, opened.checkpoint)


def run_controller_to_end(folder: Path) -> None:
    """Run one controller in this process."""
    folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(run_controller(folder))


class Life(NamedTuple):
    """Life of one controller."""

    step: int
    """Of the checkpoint from which it went on."""
    is_killed: bool


@dataclass(slots=True)
class Controllers:
    """Kills controllers of run after run; an interrupted call goes on in the same folder."""

    folder: Path
    seed: int
    until_s: float
    """Of time.monotonic(); no controller is killed later."""
    command: list[str]
    """Runs a controller on the folder that is appended."""
    counts: Counts = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.counts = Counts.load(self.folder / "counts.json")

    def kill_all(self, kills: int) -> Counts:
        """Kill so often, and let the last run reach its end."""
        expected = self._reference()
        draw = random.Random(f"{self.seed}/{self.counts.kills}")  # noqa: S311 - a simulation
        while self._may_kill(kills) or (self.folder / f"run-{self.counts.ended}").exists():
            here = self.folder / f"run-{self.counts.ended}"
            before = read_history(here / "run") if (here / "run").exists() else None
            life_s = draw.random() * LONGEST_LIFE_S if self._may_kill(kills) else None
            life = self._run_once(here, life_s)
            if before is not None:
                self.counts.add_steps_lost(max(0, before.newest_step - life.step))
            if life.is_killed:
                self.counts.add_kill(NAME)
                # Whatever is in the store at a kill must be there at the end.
                known = sorted(read_history(here / "run").rollouts)
                (here / "acknowledged").write_text("\n".join(known), encoding="utf-8")
            else:
                self._check(here, expected)
            self.counts.save(self.folder / "counts.json")
            print(self.counts, flush=True)
        return self.counts

    def _may_kill(self, kills: int) -> bool:
        return self.counts.kills < kills and time.monotonic() < self.until_s

    def _reference(self) -> RunHistory:
        """History of a run that was never killed."""
        reference = self.folder / "reference"
        if not (reference / "ended").exists():
            subprocess.run([*self.command, str(reference)], check=True, stdout=subprocess.DEVNULL)
            (reference / "ended").touch()
        return read_history(reference / "run")

    def _check(self, here: Path, expected: RunHistory) -> None:
        known = here / "acknowledged"
        acknowledged = known.read_text(encoding="utf-8").split() if known.exists() else ()
        broken = read_history(here / "run").compare(expected, acknowledged=acknowledged)
        self.counts.add_end(**broken._asdict())

    def _run_once(self, folder: Path, life_s: float | None) -> Life:
        """Run a controller to its end, or until it is killed.

        Raises:
            RuntimeError: it ended by itself with an error.
        """
        command = [*self.command, str(folder)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        try:
            opened = process.stdout.readline()
            if not opened:
                raise RuntimeError(f"the controller ended with {process.wait(START_S)}")
            step = int(json.loads(opened)["checkpoint_step"])
            if life_s is not None:
                time.sleep(life_s)
                if process.poll() is None:
                    process.kill()
                    process.wait()
                    return Life(step, is_killed=True)
            if process.wait():
                raise RuntimeError(f"the controller ended with {process.returncode}")
            return Life(step, is_killed=False)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def controller_command(script: str) -> list[str]:
    """Command that runs one controller, to which a folder is appended."""
    return [sys.executable, script, "--live"]
