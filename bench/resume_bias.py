"""Lengths of trained rollouts after crashes that drop, redraw or continue them.

python bench/resume_bias.py [--rollouts 2000] [--draws 200000]

Simulated: rollouts of log-normal length (sigma 1), crashes at random times. A crash ends every
rollout under way: it is dropped, drawn again, or continued. Continued rollouts go through the real
log of trajectories, its reader and its choice of the newest beginning: of each, as many turns go on
as were durable; the turn under way is drawn again. The ratio is the mean length of what is trained
over the mean length of what the policy samples; the share is that of rollouts over three times the
mean. A share of environments does not repeat its calls, and these rollouts are drawn again.

Examples:
  make bench-resume                            the table, a minute
  python bench/resume_bias.py --rollouts 300   a first look
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support import figures

from etude.agent.completions import Completion, FinishReason
from etude.agent.trajectory import PolicySpan
from etude.common.blobs import MemoryStore
from etude.common.weights import VersionId
from etude.trainer.rollouts.trajectories.log import TrajectoryLog
from etude.trainer.rollouts.trajectories.reader import TrajectoryReader
from etude.trainer.rollouts.trajectories.recorded_rollout import Place, RecordedRollout
from etude.trainer.rollouts.trajectories.recorder import RolloutRecorder
from etude.v1 import environments_pb2

RATES = (0.02, 0.1, 0.3)
"""Crashes per mean duration of a rollout."""
TURNS = 30
"""Turns of a rollout of mean length."""
LINGER = 0.25 / 600
"""Time until a turn is durable, over the mean duration of a rollout (ten minutes)."""
LONG = 3.0
DIVERGING = 0.05
"""Share of rollouts whose calls have other results when they are repeated."""
GOAL = 0.02
_VERSION = VersionId(1, 1)


class Lengths(NamedTuple):
    """Lengths of trained rollouts, and what the policy samples."""

    trained: Sequence[float]
    sampled: Sequence[float]
    expected_long: float
    """Share of long rollouts that the policy samples."""

    @property
    def ratio(self) -> float:
        """Mean length of trained rollouts over that of sampled ones."""
        return float(np.mean(self.trained) / np.mean(self.sampled))

    @property
    def long_share(self) -> float:
        """Long rollouts that are trained, over those that are sampled."""
        return float(np.mean(np.asarray(self.trained) > LONG) / self.expected_long)


def draw_lengths(rng: Generator, count: int) -> np.ndarray:
    """Lengths with mean 1."""
    return np.exp(rng.normal(-0.5, 1.0, count))


def simulate_redraws(rng: Generator, rate: float, count: int) -> Lengths:
    """Draw rollouts until each ends before its crash; dropping trains the same lengths."""
    sampled = draw_lengths(rng, count)
    trained, left = sampled.copy(), np.arange(count)
    while len(left):
        crash = rng.exponential(1 / rate, len(left))
        left = left[crash < trained[left]]
        trained[left] = draw_lengths(rng, len(left))
    return Lengths(trained.tolist(), sampled.tolist(), float(np.mean(sampled > LONG)))


def simulate_drops(rng: Generator, rate: float, count: int) -> Lengths:
    """Leave out rollouts that a crash ends."""
    sampled = draw_lengths(rng, count)
    trained = sampled[rng.exponential(1 / rate, count) >= sampled]
    return Lengths(trained.tolist(), sampled.tolist(), float(np.mean(sampled > LONG)))


@dataclass(slots=True)
class Continuation:
    """Rollouts that crash and go on through the real trajectory log."""

    rng: Generator
    rate: float
    diverging: float = 0.0
    turns: int = 0
    """Turns that were recorded."""

    async def simulate(self, count: int) -> Lengths:
        """Run rollouts one after the other; each has crashes of its own."""
        sampled = draw_lengths(self.rng, count)
        trained = [await self._run(f"r-{place}", float(d)) for place, d in enumerate(sampled)]
        return Lengths(trained, sampled.tolist(), float(np.mean(sampled > LONG)))

    async def _run(self, name: str, length: float) -> float:
        """Run one rollout to its end; its length in the end."""
        store = MemoryStore()
        turns, durations = _split(self.rng, length), list[float]()
        past, dispatch = RecordedRollout(), 0
        while True:
            log = TrajectoryLog.of_run(store, "run")
            writing = asyncio.create_task(log.run())
            recorder = _recorder(log, name, dispatch, past)
            recorder.start(environments_pb2.Lease(lease_id=f"{name}/{dispatch}"))
            del durations[len(past.turns) :]
            done = await self._sample(recorder, turns, durations)
            writing.cancel()
            if done:
                return sum(durations)
            dispatch += 1
            found = await TrajectoryReader(store, "run").read_group(name)
            past = found.get(name, RecordedRollout())
            if self.diverging and self.rng.random() < self.diverging:
                past, turns = (
                    RecordedRollout(),
                    _split(self.rng, float(draw_lengths(self.rng, 1)[0])),
                )

    async def _sample(
        self, recorder: RolloutRecorder, turns: list[float], durations: list[float]
    ) -> bool:
        """Sample the turns that are left; False if a crash comes first."""
        crash = self.rng.exponential(1 / self.rate)
        now = 0.0
        await recorder.log.wait_durable()
        for place in range(len(durations), len(turns)):
            took = turns[place]
            if now + took > crash:
                # The turn under way is drawn again, perhaps by other weights.
                turns[place] = float(self.rng.exponential(sum(turns) / len(turns)))
                return False
            now += took
            durations.append(took)
            recorder.add_turn([place], _completion(place), took)
            self.turns += 1
            if now + LINGER <= crash:
                await recorder.log.wait_durable()
        return True


def _split(rng: Generator, length: float) -> list[float]:
    """Durations of the turns of a rollout."""
    shares = rng.exponential(1.0, max(1, round(TURNS * length)))
    return [float(each) for each in length * shares / shares.sum()]


def _recorder(
    log: TrajectoryLog, name: str, dispatch: int, past: RecordedRollout
) -> RolloutRecorder:
    return RolloutRecorder(
        log=log,
        rollout_id=name,
        group_id=name,
        index=0,
        place=Place(1, dispatch, 0),
        rollout=past,
        lost_s=lambda: 0.0,
        is_continued=dispatch > 0,
    )


def _completion(token: int) -> Completion:
    span = PolicySpan(0, 1, _VERSION, _VERSION)
    return Completion([token], [-0.5], [span], FinishReason.STOP)


def main() -> None:
    """Simulate, print the table, and merge the ratio into bench/out/trainer.json.

    Raises:
        SystemExit: with 1 if continued rollouts miss the goal.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=2_000, help="of each continued row")
    parser.add_argument("--draws", type=int, default=200_000, help="of each other row")
    arguments = parser.parse_args()
    started_s, cpu_s = time.monotonic(), time.process_time()
    table = Table(
        "crashes per rollout", "policy", "length ratio", "long rollouts", "turns recorded"
    )
    worst = 1.0
    for number, rate in enumerate(RATES):
        rng = np.random.default_rng(number)
        for policy, simulate in (("drop", simulate_drops), ("redraw", simulate_redraws)):
            _add_row(table, rate, policy, simulate(rng, rate, arguments.draws), "-")
        for policy, diverging in (("continue", 0.0), ("continue, 5 % diverge", DIVERGING)):
            run = Continuation(np.random.default_rng(number), rate, diverging)
            lengths = asyncio.run(run.simulate(arguments.rollouts))
            _add_row(table, rate, policy, lengths, str(run.turns))
            if not diverging:
                worst = max(worst, lengths.ratio, key=lambda ratio: abs(ratio - 1))
    Console().print(table)
    cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - started_s
    print(f"{cpu_s:.1f} CPU-seconds, {wall_s:.1f} s")
    figures.record("trainer", resume_length_ratio=round(worst, 4))
    if abs(worst - 1) > GOAL:
        sys.exit(f"continued rollouts have {worst:.3f} of their length; the goal is 1 ± {GOAL}")


def _add_row(table: Table, rate: float, policy: str, lengths: Lengths, turns: str) -> None:
    table.add_row(str(rate), policy, f"{lengths.ratio:.3f}", f"{lengths.long_share:.2f}", turns)


if __name__ == "__main__":
    main()
