"""Figures of all acts that were played, and the last line of the demo."""

from typing import NamedTuple

from etude.demo.realtime.figures import PromiseCheck
from etude.demo.realtime.first_act import FirstAct
from etude.demo.realtime.second_act import SecondAct
from etude.demo.realtime.third_act import ThirdAct


class PlayedActs(NamedTuple):
    """Figures of the acts; None for one that was not played."""

    first: FirstAct | None = None
    second: SecondAct | None = None
    third: ThirdAct | None = None

    @property
    def checks(self) -> tuple[PromiseCheck, ...]:
        """Promises that were checked."""
        return tuple(check for act in self._played for check in act.checks)

    def collect_figures(self, total_s: float) -> dict[str, float]:
        """Figures for comparison with other runs."""
        figures: dict[str, float] = {}
        if self.first is not None:
            figures |= _first_figures(self.first)
        if self.second is not None:
            figures |= _second_figures(self.second)
        if self.third is not None:
            figures |= {
                "gate_stopped": self.third.gate_stopped,
                "canary_rolled_back": self.third.canary_rolled_back,
            }
            if self.third.rollback_s is not None:
                figures["rollback_s"] = self.third.rollback_s
        requests, failed, retried = self.count_requests()
        figures |= {"requests": requests, "failed": failed, "retried": retried}
        return figures | {"total_s": total_s}

    def summarize(self, total_s: float) -> str:
        """The last line of the demo: what was checked, and nothing else."""
        first, second, third = self.first, self.second, self.third
        parts = []
        if first is not None:
            parts += [
                f"persistence {first.persistence.describe()}",
                f"complaints {first.complaints.describe()}",
                f"latency p50 {first.latency_before_s:.2f} -> {first.latency_after_s:.2f} s",
                f"windows {first.num_windows}",
                f"cycle {first.cycle_s:.0f} s",
            ]
        requests, failed, retried = self.count_requests()
        parts.append(f"served {requests} requests, failed {failed}, retried {retried}")
        if first is not None:
            counts = f"lost {first.num_lost}, twice {first.num_twice}"
            parts.append(f"events {first.num_events}, {counts}")
        if second is not None:
            parts += [
                f"questions {_describe(second, 0)}",
                f"broken calls {_describe(second, 1)}",
            ]
        releases = []
        if third is not None:
            canary = f"canary rolled back {third.canary_rolled_back}"
            if third.rollback_s is not None:
                canary += f" in {third.rollback_s:.1f} s"
            releases += [f"gate stopped {third.gate_stopped}", canary]
        if second is not None:
            releases.append(f"frozen {second.frozen}")
        if releases:
            parts.append(", ".join(releases))
        parts.append(f"total {total_s:.0f} s")
        return f"realtime: {' | '.join(parts)}"

    @property
    def _played(self) -> list[FirstAct | SecondAct | ThirdAct]:
        acts = (self.first, self.second, self.third)
        return [act for act in acts if act is not None]

    def count_requests(self) -> tuple[int, int, int]:
        """Requests, of these failed ones, and retried ones."""
        played = self._played
        return (
            sum(act.num_requests for act in played),
            sum(act.num_failed for act in played),
            sum(act.num_retried for act in played),
        )


def _first_figures(act: FirstAct) -> dict[str, float]:
    return {
        "persistence_before": act.persistence.before,
        "persistence_after": act.persistence.after,
        "persistence_ci_low": act.persistence.low,
        "complaints_before": act.complaints.before,
        "complaints_after": act.complaints.after,
        "latency_before": act.latency_before_s,
        "latency_after": act.latency_after_s,
        "cycle_s": act.cycle_s,
        "windows": act.num_windows,
        "events": act.num_events,
        "lost": act.num_lost,
        "twice": act.num_twice,
    }


def _second_figures(act: SecondAct) -> dict[str, float]:
    rates = {"before": act.before, "fired": act.fired, "peak": act.peak, "after": act.after}
    return {
        "frozen": act.frozen,
        "fired_at_window": act.fired_at_window,
        **{f"questions_{when}": each.questions for when, each in rates.items()},
        **{f"broken_calls_{when}": each.broken_calls for when, each in rates.items()},
    }


def _describe(act: SecondAct, hack: int) -> str:
    """The course of one of the hack rates, in percent."""
    return " -> ".join(f"{each[hack]:.0%}" for each in (act.before, act.peak, act.after))
