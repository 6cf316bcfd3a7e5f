"""Targets of the demo, and its result from the run's own record."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from etude.cli.demo.stopwatch import Stopwatch

Row = Mapping[str, Any]

MIN_GAIN = 0.35
"""Least rise of held-out success over the warmed-up policy."""
MIN_REWARD_RATIO = 1.5
"""Training reward of the last ten steps against that of the first five."""
FIRST_STEP_S, TOTAL_S = 120.0, 600.0
"""Limits on two idle cores; a slower demo is reported and does not fail."""


class TargetRange(NamedTuple):
    """A figure's name and its bounds."""

    name: str
    low: float = 0.0
    high: float = float("inf")


TARGETS: Mapping[str, TargetRange] = {
    "held_out_before": TargetRange("held-out T=1 after the warm-up", 0.25, 0.45),
    # A warm-up that already solves more leaves nothing to show.
    "greedy_before": TargetRange("held-out greedy after the warm-up", 0.30, 0.60),
    "malformed_before": TargetRange("malformed calls a rollout after the warm-up", high=0.1),
    "edit_errors_before": TargetRange("edits refused after the warm-up (greedy)", high=0.5),
    "held_out_after": TargetRange("held-out T=1 at the end", 0.72),
    "greedy_after": TargetRange("held-out greedy at the end", 0.88),
    "reward_last": TargetRange("training reward of the last ten steps", 0.72),
    "read_first_after": TargetRange("first edit after reading that file (greedy)", 0.95),
    "tests_after": TargetRange("tests run after the last edit (greedy)", 0.9),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """The figures of one demo."""

    held_out_before: float
    held_out_after: float
    greedy_before: float
    greedy_after: float
    malformed_before: float
    edit_errors_before: float
    read_first_after: float
    tests_after: float
    reward_first: float
    reward_last: float
    first_step_s: float
    """From the command to the first optimiser step, whatever its phase; no time while stopped."""
    rl_s: float
    """From the end of the warm-up to the end of the last evaluation."""
    total_s: float
    versions: int
    rollouts: int
    lost: int
    """Rollouts of the accepted groups that were neither trained nor accounted for."""
    peak_rss_gib: float

    def summary(self) -> str:
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
        found = []
        for field, target in TARGETS.items():
            value = getattr(self, field)
            if value < target.low:
                found.append(f"{target.name}: {value:.2f}, below {target.low}")
            if value > target.high:
                found.append(f"{target.name}: {value:.2f}, above {target.high}")
        gains = {
            "held-out T=1": self.held_out_after - self.held_out_before,
            "held-out greedy": self.greedy_after - self.greedy_before,
        }
        for name, gain in gains.items():
            if gain < MIN_GAIN:
                found.append(f"{name} rose by {gain:.2f}, less than {MIN_GAIN}")
        if self.reward_last < MIN_REWARD_RATIO * self.reward_first:
            found.append(
                f"training reward went from {self.reward_first:.2f} to {self.reward_last:.2f},"
                f" less than {MIN_REWARD_RATIO} times as much"
            )
        if self.lost:
            found.append(f"{self.lost} rollouts are unaccounted for")
        return found

    def delays(self) -> list[str]:
        """Times above their limits on two idle cores."""
        limits = {
            "first optimiser step": (self.first_step_s, FIRST_STEP_S),
            "total": (self.total_s, TOTAL_S),
        }
        return [
            f"{name} {took_s:.0f} s, more than {limit_s:.0f}"
            for name, (took_s, limit_s) in limits.items()
            if took_s > limit_s
        ]


class IncompleteRecordError(ValueError):
    """The record lacks an evaluation that the result needs."""


def measure_demo(
    rows: Sequence[Row], *, times: Stopwatch, lost: int, peak_rss_gib: float
) -> DemoResult:
    """The figures of a finished run.

    Args:
        rows: its record, without rows that a later one replaces.
        times: when the command worked on it.
        lost: rollouts that the audit could not account for.
        peak_rss_gib: memory of all processes together.

    Raises:
        IncompleteRecordError: the record lacks an evaluation before or after training.
    """
    steps = [r for r in rows if r.get("kind") == "step"]
    rl = [r for r in steps if "reward_mean" in r]
    sampled = [r for r in rows if r.get("kind") == "eval" and "success" in r]
    greedy = [r for r in sampled if r.get("greedy_success") is not None]
    if not rl or len(sampled) < 2 or len(greedy) < 2:
        raise IncompleteRecordError(
            "the record holds no evaluation, sampled and greedy, at both ends"
        )
    supervised = [r for r in steps if "reward_mean" not in r]
    rl_started = float(supervised[-1]["time_s"]) if supervised else float(rl[0]["time_s"])
    rewards = [float(r["reward_mean"]) for r in rl]
    return DemoResult(
        held_out_before=float(sampled[0]["success"]),
        held_out_after=float(sampled[-1]["success"]),
        greedy_before=float(greedy[0]["greedy_success"]),
        greedy_after=float(greedy[-1]["greedy_success"]),
        malformed_before=_habit(sampled[0], "sampled", "malformed_per_rollout"),
        edit_errors_before=_habit(greedy[0], "greedy", "edit_error_rate"),
        read_first_after=_habit(greedy[-1], "greedy", "read_before_edit"),
        tests_after=_habit(greedy[-1], "greedy", "tests_after_edit"),
        reward_first=fmean(rewards[:5]),
        reward_last=fmean(rewards[-10:]),
        first_step_s=times.seconds_before(float(steps[0]["time_s"])),
        rl_s=times.seconds_before(float(sampled[-1]["time_s"])) - times.seconds_before(rl_started),
        total_s=times.total_s,
        versions=sum(r.get("kind") == "version" for r in rows),
        rollouts=sum(int(r.get("rollouts", 0)) for r in rl),
        lost=lost,
        peak_rss_gib=peak_rss_gib,
    )


def _habit(evaluation: Row, mode: str, name: str) -> float:
    """A share of the rollouts; 0 for a policy that never did such a thing."""
    return float(evaluation.get("behaviour", {}).get(mode, {}).get(name) or 0.0)
