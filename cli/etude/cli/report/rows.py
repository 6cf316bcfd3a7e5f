"""Reading a run's metrics rows into curves."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of a chart."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    as_points: bool = False


def read_rows(folder: Path) -> list[Row]:
    """All rows of metrics.jsonl; a torn last line is left out."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    rows: list[Row] = []
    for line in path.read_bytes().split(b"\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return latest(rows)


def latest(rows: Iterable[Row]) -> list[Row]:
    """One row per step and evaluation: after a resume the later row replaces the earlier one."""
    kept: dict[tuple[object, ...], Row] = {}
    for position, row in enumerate(rows):
        kind = row.get("kind")
        if kind in {"step", "eval"}:
            kept[kind, row.get("phase"), row.get("step"), row.get("name")] = row
        else:
            kept[kind, position] = row
    return sorted(kept.values(), key=lambda row: float(row.get("time_s", 0)))


def steps(rows: Iterable[Row], *, rl: bool) -> list[Row]:
    """Optimiser steps of the sampled phases, or of the supervised ones."""
    return [r for r in rows if r.get("kind") == "step" and ("reward_mean" in r) == rl]


def evaluations(rows: Iterable[Row]) -> list[Row]:
    """Evaluations in order."""
    return [r for r in rows if r.get("kind") == "eval"]


def curve(rows: Sequence[Row], field: str, label: str, *, as_points: bool = False) -> Curve:
    """The values of one field over steps; rows without it are left out."""
    present = [r for r in rows if isinstance(r.get(field), int | float)]
    return Curve(
        label=label,
        x=tuple(float(r["step"]) for r in present),
        y=tuple(float(r[field]) for r in present),
        as_points=as_points,
    )
