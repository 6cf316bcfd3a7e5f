"""What all traces cost together, mode by mode."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from autoscaler_bench.simulation import Mode, Outcome

Found = Mapping[str, Mapping[Mode, Outcome]]
"""By trace and mode."""


def figures(found: Found) -> dict[str, Any]:
    """The figures of bench/out/autoscaler.json."""
    said: dict[str, Any] = {
        str(mode): _together([modes[mode] for modes in found.values()]) for mode in Mode
    }
    plans = [modes[mode] for modes in found.values() for mode in (Mode.PLAN, Mode.PATIENT)]
    said["plan_idle_over_kpa_idle"] = _ratio(said, Mode.PLAN, Mode.KPA, "idle_s")
    said["plan_sandbox_over_kpa_sandbox"] = _ratio(said, Mode.PLAN, Mode.KPA, "sandbox_s")
    said["decide_us"] = round(
        1e6 * sum(each.decide_s for each in plans) / sum(each.decisions for each in plans), 1
    )
    said["hard_capped"] = sum(each.capped for each in plans)
    said["traces"] = {
        name: {str(mode): _together([outcome]) for mode, outcome in modes.items()}
        for name, modes in found.items()
    }
    return said


def table(found: Found, said: Mapping[str, Any]) -> Table:
    """Each mode, and of each trace its idle GPU-seconds and its replica-seconds."""
    shown = Table(title="per trace: GPU-seconds that waited / thousands of replica-seconds")
    shown.add_column("mode")
    for column in ("idle, GPU-s", "sandbox, 1000 s", "over-created", "p99 wait, s", *found):
        shown.add_column(column, justify="right")
    for mode in Mode:
        all_of_it = said[str(mode)]
        shown.add_row(
            str(mode),
            f"{all_of_it['idle_s']:.0f}",
            f"{all_of_it['sandbox_s'] / 1000:.0f}",
            f"{all_of_it['over_created']}",
            f"{all_of_it['wait_p99_s']:.1f}",
            *(
                f"{modes[mode].idle_s:.0f} / {modes[mode].sandbox_s / 1000:.0f}"
                for modes in found.values()
            ),
        )
    return shown


def _together(outcomes: list[Outcome]) -> dict[str, float]:
    waits_s = sorted(wait_s for each in outcomes for wait_s in each.waits_s)
    return {
        "idle_s": round(sum(each.idle_s for each in outcomes), 1),
        "sandbox_s": round(sum(each.sandbox_s for each in outcomes)),
        "over_created": sum(each.over_created for each in outcomes),
        "wait_p99_s": round(waits_s[int(0.99 * (len(waits_s) - 1))], 2),
        "lasted_s": round(sum(each.lasted_s for each in outcomes)),
        "cpu_s": round(sum(each.cpu_s for each in outcomes), 2),
    }


def _ratio(said: Mapping[str, Any], ours: Mode, theirs: Mode, key: str) -> float:
    ratio: float = said[str(ours)][key] / said[str(theirs)][key]
    return round(ratio, 4)
