"""A figure beside its goal: one row of the table, one key of the JSON file."""

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

OUT = Path(__file__).parents[1] / "out" / "env.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What was measured."""

    key: str
    """Name in the JSON file."""
    what: str
    value: float
    unit: str = ""
    goal: float | None = None
    """The most that is wanted, or the least."""
    is_least: bool = False
    cpu_ms: float | None = None
    """CPU time of one operation: nodes, brokers and machines."""
    count: int = 1
    """Operations that the figure is of."""
    note: str = ""

    @property
    def is_met(self) -> bool | None:
        """Whether the goal is reached; None without one."""
        if self.goal is None:
            return None
        return self.value >= self.goal if self.is_least else self.value <= self.goal


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of all does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def median(values: Sequence[float]) -> float:
    """The middle one."""
    return statistics.median(values)


def show(figures: Sequence[Figure], console: Console) -> None:
    """Print the table."""
    load = os.getloadavg()[0]
    title = f"environments, {os.cpu_count()} cores, load {load:.1f}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("figure", "measured", "goal", "", "CPU-ms", "n", ""):
        table.add_column(name, justify="left" if name in {"figure", ""} else "right")
    for each in figures:
        sign = ">=" if each.is_least else "<="
        table.add_row(
            each.what,
            f"{each.value:,.4g} {each.unit}".strip(),
            "" if each.goal is None else f"{sign} {each.goal:,g} {each.unit}".strip(),
            {True: "met", False: "MISSED", None: ""}[each.is_met],
            "" if each.cpu_ms is None else f"{each.cpu_ms:.1f}",
            str(each.count),
            each.note,
        )
    console.print(table)


def merge(figures: Sequence[Figure], path: Path = OUT) -> Mapping[str, float]:
    """Write the figures over those of the same name in the file; returns all of them."""
    path.parent.mkdir(exist_ok=True)
    found = json.loads(path.read_text()) if path.exists() else {}
    found |= {each.key: round(each.value, 4) for each in figures}
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    return dict(found)
