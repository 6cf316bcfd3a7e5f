"""The legs of a way to a version: each is prepared while requests run, and goes live at once."""

from collections.abc import Sequence
from typing import NamedTuple

from etude.common.weights import Edge, VersionRef


class Leg(NamedTuple):
    """One prepare and commit."""

    edge: Edge
    """From what is live to what is live afterwards."""
    parts: tuple[Edge, ...]
    """What it is made of: itself, or several steps that are taken on disk and end in it."""


def legs_of(edges: Sequence[Edge], live: VersionRef | None) -> list[Leg]:
    """Cut a way into what may go live.

    Around damage a way may begin at a complete version below the live one. The versions between
    must not be served: those of a running request would go down. So everything up to the first
    newer version, or to the end of the way, is one leg.

    Args:
        edges: the way, as planned.
        live: what is served; None for nothing.
    """
    if live is None or not edges or edges[0].base is not None:
        return [Leg(edge, (edge,)) for edge in edges]
    numbers = [edge.target.number for edge in edges]
    reached = next((n for n, number in enumerate(numbers) if number > live.number), len(edges) - 1)
    parts = tuple(edges[: reached + 1])
    return [Leg(_joined(parts), parts), *(Leg(edge, (edge,)) for edge in edges[reached + 1 :])]


def _joined(parts: tuple[Edge, ...]) -> Edge:
    if len(parts) == 1:
        return parts[0]
    objects = tuple(item for part in parts for item in part.objects)
    return Edge("keyframe", None, parts[-1].target, parts[-1].schema_sha256, objects)
