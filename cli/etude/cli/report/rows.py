"""Rows of a run's record as the points of curves."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of a chart."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    as_points: bool = False


def steps(rows: Iterable[Row], *, rl: bool) -> list[Row]:
    """Optimiser steps of the sampled phases, or of the supervised ones."""
    return [r for r in rows if r.get("kind") == "step" and ("reward_mean" in r) == rl]


def evaluations(rows: Iterable[Row]) -> list[Row]:
    """Evaluations in order."""
    return [r for r in rows if r.get("kind") == "eval"]


def versions(rows: Iterable[Row]) -> list[Row]:
    """Published versions in order."""
    return [r for r in rows if r.get("kind") == "version"]


def curve(rows: Sequence[Row], field: str, label: str, *, as_points: bool = False) -> Curve:
    """The values of one field over steps; rows without it are left out."""
    present = [r for r in rows if isinstance(r.get(field), int | float)]
    return Curve(
        label=label,
        x=tuple(float(r["step"]) for r in present),
        y=tuple(float(r[field]) for r in present),
        as_points=as_points,
    )
