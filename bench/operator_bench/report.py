"""The figures beside their goals."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rich.table import Table


class Goal(NamedTuple):
    """What a figure should be."""

    key: str
    about: str
    text: str
    is_met: Callable[[float], bool]


GOALS = (
    Goal("runs_per_s", "runs reconciled per second", ">= 20", lambda v: v >= 20),
    Goal("reconcile_p50_ms", "a pass over a run, p50, ms", "", lambda _: True),
    Goal("reconcile_p99_ms", "a pass over a run, p99, ms", "<= 5000", lambda v: v <= 5_000),
    Goal("writes_per_lifecycle", "API writes per life", "<= 60", lambda v: v <= 60),
    Goal("writes_at_rest_per_min", "API writes per minute at rest", "0", lambda v: v == 0),
    Goal("rss_mib_10k_pods", "RSS at 10,000 pods, MiB", "<= 400", lambda v: v <= 400),
    Goal("restart_s", "restart to consistent, s", "<= 20", lambda v: v <= 20),
    Goal(
        "spec_change_p99_ms",
        "spec change to first child write, p99, ms",
        "<= 1000",
        lambda v: v <= 1_000,
    ),
)


def table(said: Mapping[str, Any]) -> Table:
    """Each figure, its goal, and whether it is met."""
    shown = Table(title=f"operator: {said['runs']} runs, {said['pods']} pods")
    for column in ("", "figure", "goal", "met"):
        shown.add_column(column, justify="left" if not column else "right")
    for goal in GOALS:
        value = said.get(goal.key)
        if value is None:
            shown.add_row(goal.about, "-", goal.text, "not measured")
            continue
        met = ("yes" if goal.is_met(value) else "NO") if goal.text else ""
        shown.add_row(goal.about, f"{value:g}", goal.text, met)
    return shown
