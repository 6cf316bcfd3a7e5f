"""What the demo must show, judged from the run's own record."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]

MIN_SAMPLED = 0.72
MIN_GREEDY = 0.88
MIN_GAIN = 0.35
"""Held-out success after training, and how far above the warmed-up policy it must be."""

MAX_GREEDY_BEFORE = 0.60
"""A warm-up that already solves more leaves nothing to show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The figures of one demo."""

    held_out_before: float
    held_out_after: float
    greedy_before: float
    greedy_after: float
    first_step_s: float
    """From the command to the first optimiser step, whatever its phase."""
    rl_s: float
    """From the end of the warm-up to the end of the last evaluation."""
    total_s: float
    versions: int
    rollouts: int
    lost: int
    """Rollouts of the accepted groups that were neither trained nor accounted for."""
    peak_rss_gib: float

    def line(self) -> str:
        """The last line of the demo."""
        return (
            f"demo: held-out T=1 {self.held_out_before:.2f} -> {self.held_out_after:.2f},"
            f" greedy {self.greedy_before:.2f} -> {self.greedy_after:.2f}"
            f" | first optimiser step {self.first_step_s:.0f} s | RL {self.rl_s:.0f} s"
            f" | total {self.total_s:.0f} s | versions {self.versions}"
            f" | rollouts {self.rollouts}, lost {self.lost}"
            f" | peak RSS {self.peak_rss_gib:.1f} GiB"
        )

    def misses(self) -> list[str]:
        """Targets that were not met, in words; empty when the demo shows what it claims."""
        gains = {
            "held-out T=1": (self.held_out_before, self.held_out_after, MIN_SAMPLED),
            "held-out greedy": (self.greedy_before, self.greedy_after, MIN_GREEDY),
        }
        found = []
        for name, (before, after, least) in gains.items():
            if after < least:
                found.append(f"{name} ended at {after:.2f}, below {least}")
            if after - before < MIN_GAIN:
                found.append(f"{name} rose by {after - before:.2f}, less than {MIN_GAIN}")
        if self.greedy_before > MAX_GREEDY_BEFORE:
            found.append(
                f"greedy started at {self.greedy_before:.2f}, above {MAX_GREEDY_BEFORE}:"
                " the warm-up left too little to learn"
            )
        if self.lost:
            found.append(f"{self.lost} rollouts are unaccounted for")
        return found


def outcome(
    rows: Sequence[Row], *, started_s: float, ended_s: float, lost: int, peak_rss_gib: float
) -> Outcome:
    """The figures of a finished run.

    Args:
        rows: its record, without rows that a later one replaces.
        started_s: Unix time of the command.
        ended_s: Unix time when the run ended.
        lost: rollouts that the audit could not account for.
        peak_rss_gib: memory of all processes together.

    Raises:
        ValueError: the record lacks an evaluation before or after training.
    """
    steps = [r for r in rows if r.get("kind") == "step"]
    rl = [r for r in steps if "reward_mean" in r]
    sampled = [r for r in rows if r.get("kind") == "eval" and "success" in r]
    greedy = [r for r in sampled if r.get("greedy_success") is not None]
    if not rl or len(sampled) < 2 or len(greedy) < 2:
        raise ValueError("the record holds no evaluation before and after training")
    supervised = [r for r in steps if "reward_mean" not in r]
    rl_started = float(supervised[-1]["time_s"]) if supervised else float(rl[0]["time_s"])
    return Outcome(
        held_out_before=float(sampled[0]["success"]),
        held_out_after=float(sampled[-1]["success"]),
        greedy_before=float(greedy[0]["greedy_success"]),
        greedy_after=float(greedy[-1]["greedy_success"]),
        first_step_s=float(steps[0]["time_s"]) - started_s,
        rl_s=float(sampled[-1]["time_s"]) - rl_started,
        total_s=ended_s - started_s,
        versions=sum(r.get("kind") == "version" for r in rows),
        rollouts=sum(int(r.get("rollouts", 0)) for r in rl),
        lost=lost,
        peak_rss_gib=peak_rss_gib,
    )
