"""Update steps of a path to a version: each is prepared while requests run."""

from collections.abc import Sequence
from typing import NamedTuple

from etude.common.weights import Edge, VersionRef


class UpdateStep(NamedTuple):
    """One prepare and activation."""

    edge: Edge
    """From the live version to the next live version."""
    parts: tuple[Edge, ...]
    """The edge itself, or several edges that are merged on disk and end in it: deltas are folded,
    and on a complete version they are applied."""


def split_path(edges: Sequence[Edge], live: VersionRef | None) -> list[UpdateStep]:
    """Split an update path into steps that may go live.

    Around damage a path may start at a complete version below the live one. The versions between
    must not be served: the version of a running request would decrease. So everything up to the
    first newer version, or to the end of the path, is one step.

    Args:
        edges: the planned path.
        live: the live version; None before the first.
    """
    if live is None or not edges or edges[0].base is not None:
        return [UpdateStep(edge, (edge,)) for edge in edges]
    numbers = [edge.target.number for edge in edges]
    reached = next((n for n, number in enumerate(numbers) if number > live.number), len(edges) - 1)
    parts = tuple(edges[: reached + 1])
    return [
        UpdateStep(_merge_edges(parts), parts),
        *(UpdateStep(edge, (edge,)) for edge in edges[reached + 1 :]),
    ]


def merge_path(edges: Sequence[Edge]) -> list[UpdateStep]:
    """Merge an update path into one step, so that only its end goes live."""
    return [UpdateStep(_merge_edges(tuple(edges)), tuple(edges))] if edges else []


def _merge_edges(parts: tuple[Edge, ...]) -> Edge:
    if len(parts) == 1:
        return parts[0]
    objects = tuple(item for part in parts for item in part.objects)
    base, end = parts[0].base, parts[-1]
    return Edge("skip" if base else "keyframe", base, end.target, end.schema_sha256, objects)
