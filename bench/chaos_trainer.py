"""Processes killed with SIGKILL at random points: nothing is lost, repeated or different.

python bench/chaos_trainer.py [--real 40] [--controllers 160] [--minutes 90] [--folder DIR]

The real stack first: runs of the local runtime with a small policy, a real engine, learner, broker
and sandboxes (driver Process). A process of each role is killed, at any time, or while a checkpoint
is stored, a version published, a turn sampled; now and then all of them at once. The journal and
the logs of turns of each run are audited at its end; a step that is trained again must have the
same loss, gradient norm and digest.

Then controllers alone, over a simulated deterministic learner and rollouts: a run that was killed
again and again is compared, step by step, with one that never was.

The same folder goes on where an interrupted call ended. After --minutes nothing more is killed,
and the runs under way are led to their ends.

Examples:
  make chaos-trainer                                        200 kills
  python bench/chaos_trainer.py --real 4 --controllers 10   a first look
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # learner and rollouts are those of the tests

from chaos_bench.controllers import Controllers, controller_command, run_controller_to_end
from chaos_bench.counts import Counts
from chaos_bench.real_stack import RealStack
from tests.support import figures

STEPS_LOST_GOAL = 1


def main() -> None:
    """Kill, print the counts, and record them in bench/out/chaos_trainer.json.

    Raises:
        SystemExit: with 1 if an invariant is broken.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--real", type=int, default=40)
    parser.add_argument("--controllers", type=int, default=160)
    parser.add_argument("--minutes", type=float, default=90)
    parser.add_argument("--folder", type=Path, default=figures.OUT / "chaos-trainer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--live", type=Path, help="run one controller on this folder, to its end")
    chosen = parser.parse_args()
    if chosen.live is not None:
        run_controller_to_end(chosen.live)
        return
    until_s, folder = time.monotonic() + chosen.minutes * 60, chosen.folder.absolute()
    counts = Counts()
    if chosen.real:
        counts = RealStack(folder / "real", chosen.seed, until_s).kill_all(chosen.real)
        _record(counts)
    if chosen.controllers:
        command = controller_command(__file__)
        controllers = Controllers(folder / "controllers", chosen.seed, until_s, command)
        counts = counts.merge(controllers.kill_all(chosen.controllers))
    _record(counts)
    if not counts.is_sound:
        sys.exit("an invariant is broken: the histories are kept")
    if counts.max_steps_lost > STEPS_LOST_GOAL:
        sys.exit(f"{counts.max_steps_lost} steps were lost; the goal is {STEPS_LOST_GOAL}")


def _record(counts: Counts) -> None:
    print(counts, flush=True)
    figures.record(
        "chaos_trainer",
        kills=counts.kills,
        lost=counts.lost,
        duplicated=counts.duplicated,
        diverged=counts.diverged,
        max_steps_lost=counts.max_steps_lost,
        runs_ended=counts.ended,
        kills_by_role=dict(counts.by_role),
    )


if __name__ == "__main__":
    main()
