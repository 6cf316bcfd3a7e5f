"""Controllers killed with SIGKILL at random points: nothing is lost, repeated or different.

python bench/chaos_trainer.py [--kills 150] [--folder bench/out/chaos-trainer] [--seed 0]

Runs of the real controller on a folder, each a process: admission, batch rule, ledger, journal,
publishing and a checkpoint of each step are the product's own; learner and rollouts are simulated
and deterministic. A process is killed at a random time after its start, by itself at any point of a
write, a checkpoint or a publication, and a successor takes the run over. A run that reaches its end
is compared with one that was never killed: the same batches, losses, gradient norms and digests in
each step. The same folder goes on where an interrupted call ended.

Examples:
  make chaos-trainer                         150 kills
  python bench/chaos_trainer.py --kills 10   a first look
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # learner and rollouts are those of the tests

from chaos_bench.history import read_history
from controller_bench.run import RunShape, take_over, train_to_end
from tests.support import figures
from tests.support.trainer_simulation.workers import SimulatedRollouts

from etude.common.weights import VersionId
from etude.trainer.controller.run import Run

SHAPE = RunShape(
    prompts_per_step=2, group_size=3, staleness=0, steps=60, seed=5, steps_per_checkpoint=1
)
LONGEST_ROLLOUT_S = 0.05
LONGEST_LIFE_S = 1.5
"""Longest life of a controller that has taken its run over."""
START_S = 120.0
STEPS_LOST_GOAL = 1


class Counts(NamedTuple):
    """Counts of all runs so far."""

    kills: int = 0
    ended: int = 0
    """Runs that reached their ends."""
    lost: int = 0
    duplicated: int = 0
    diverged: int = 0
    max_steps_lost: int = 0


def main() -> None:
    """Kill controllers, print the counts, and record them in bench/out/chaos_trainer.json.

    Raises:
        SystemExit: with 1 if an invariant is broken.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=150)
    parser.add_argument("--folder", type=Path, default=figures.OUT / "chaos-trainer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--live", type=Path, help="run one controller on this folder, to its end")
    chosen = parser.parse_args()
    if chosen.live is not None:
        chosen.live.mkdir(parents=True, exist_ok=True)
        asyncio.run(_live(chosen.live))
        return
    chosen.folder.mkdir(parents=True, exist_ok=True)
    counts = _kill_all(chosen.folder, chosen.kills, chosen.seed)
    print(counts)
    figures.record("chaos_trainer", **counts._asdict())
    if counts.lost or counts.duplicated or counts.diverged:
        sys.exit("an invariant is broken: the histories are kept")
    if counts.max_steps_lost > STEPS_LOST_GOAL:
        sys.exit(f"{counts.max_steps_lost} steps were lost; the goal is {STEPS_LOST_GOAL}")


async def _live(folder: Path) -> None:
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


def _kill_all(folder: Path, kills: int, seed: int) -> Counts:
    """Kill controllers of run after run; what is counted is kept after each kill."""
    state = folder / "counts.json"
    counts = Counts(**json.loads(state.read_text())) if state.exists() else Counts()
    reference = folder / "reference"
    if not (reference / "ended").exists():
        subprocess.run(_command(reference), check=True, stdout=subprocess.DEVNULL)
        (reference / "ended").touch()
    expected = read_history(reference / "run")
    draw = random.Random(f"{seed}/{counts.kills}")  # noqa: S311 - a simulation
    while counts.kills < kills or not (folder / f"run-{counts.ended - 1}" / "ended").exists():
        here = folder / f"run-{counts.ended}"
        before = read_history(here / "run") if (here / "run").exists() else None
        may_kill = counts.kills < kills
        resumed = _run_controller(here, draw.random() * LONGEST_LIFE_S if may_kill else None)
        if before is not None:
            lost = max(0, before.newest_step - resumed.step)
            counts = counts._replace(max_steps_lost=max(counts.max_steps_lost, lost))
        if resumed.is_killed:
            counts = counts._replace(kills=counts.kills + 1)
            after = read_history(here / "run")
            # Whatever is in the store at a kill must be there at the end.
            (here / "acknowledged").write_text("\n".join(sorted(after.rollouts)))
        else:
            known = here / "acknowledged"
            broken = read_history(here / "run").compare(
                expected, acknowledged=known.read_text().split() if known.exists() else ()
            )
            counts = counts._replace(
                ended=counts.ended + 1,
                lost=counts.lost + broken.lost,
                duplicated=counts.duplicated + broken.duplicated,
                diverged=counts.diverged + broken.diverged,
            )
            (here / "ended").touch()
        state.write_text(json.dumps(counts._asdict()))
        print(counts, flush=True)
    return counts


class Life(NamedTuple):
    """Life of one controller."""

    step: int
    """Of the checkpoint from which it went on."""
    is_killed: bool


def _run_controller(folder: Path, life_s: float | None) -> Life:
    """Run a controller to its end, or until it is killed.

    Raises:
        RuntimeError: it ended by itself with an error.
    """
    process = subprocess.Popen(_command(folder), stdout=subprocess.PIPE, text=True)
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


def _command(folder: Path) -> list[str]:
    return [sys.executable, __file__, "--live", str(folder)]


if __name__ == "__main__":
    main()
