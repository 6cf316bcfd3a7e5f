"""Walks the schema of the chart's values, and makes values that it must refuse."""

import itertools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml
from tests.support.chart.helm import CHART

Node = dict[str, Any]
ANY = "any"
"""Stands for a name that users choose."""
WHOLE = {"resources", "affinity"}
"""Objects of Kubernetes that are given and documented as one value, though we know their fields."""


class Place(NamedTuple):
    """One value that may be given; numbers in its path stand for entries of lists."""

    path: tuple[str | int, ...]
    node: Node

    @property
    def pointer(self) -> str:
        """The path as Helm's messages have it."""
        return "".join(f"/{part}" for part in self.path)

    @property
    def name(self) -> str:
        """The path as users write it."""
        return ".".join(map(str, self.path))

    @property
    def is_value(self) -> bool:
        """Whether users set it, and neither something above nor something below it."""
        is_below = not WHOLE.isdisjoint(self.path[:-1])
        is_entry = ANY in self.path or any(isinstance(part, int) for part in self.path)
        holds_others = "properties" in self.node and self.path[-1] not in WHOLE
        return not (is_below or is_entry or holds_others)

    @property
    def has_default(self) -> bool:
        """Whether the chart gives it a value, which templates then count on."""
        given: Any = yaml.safe_load((CHART / "values.yaml").read_text())
        for part in self.path:
            if not isinstance(given, dict) or part not in given:
                return False
            given = given[part]
        return WHOLE.isdisjoint(self.path[:-1])

    @property
    def wrong(self) -> Any:
        """A value of a type that it must not have, or none of its enumeration."""
        if "enum" in self.node:
            return "Nonesuch"
        return "none" if self.node.get("type") == "array" else ["none"]

    @property
    def beyond(self) -> Any:
        """A value of a right type beyond its limits; None where it has none."""
        if "pattern" in self.node:
            return " no\tvalue "
        if "maximum" in self.node:
            return self.node["maximum"] + 1
        return self.node["minimum"] - 1 if "minimum" in self.node else None


def schema() -> Node:
    """The schema as it is shipped."""
    read: Node = json.loads((CHART / "values.schema.json").read_text())
    return read


def places() -> list[Place]:
    """Every value that the schema knows, parents before children."""
    root = schema()
    return list(_below(Place((), root), root["definitions"]))


def _below(place: Place, definitions: Node) -> Iterator[Place]:
    for name, child in place.node.get("properties", {}).items():
        yield from _with_children((*place.path, name), child, definitions)
    if isinstance(items := place.node.get("items"), dict):
        yield from _with_children((*place.path, 0), items, definitions)
    if isinstance(values := place.node.get("additionalProperties"), dict):
        yield from _with_children((*place.path, ANY), values, definitions)


def _with_children(path: tuple[str | int, ...], node: Node, definitions: Node) -> Iterator[Place]:
    if "$ref" in node:
        node = definitions[node["$ref"].rpartition("/")[2]]
    place = Place(path, node)
    yield place
    yield from _below(place, definitions)


def put(values: Node, path: tuple[str | int, ...], value: Any) -> None:
    """Set one value, and make what lies above it; a list gets one entry."""
    here: Any = values
    for part, below in itertools.pairwise(path):
        empty: Any = [] if isinstance(below, int) else {}
        if isinstance(here, dict):
            here = here.setdefault(part, empty)
        else:
            here[:] = here or [empty]
            here = here[0]
    if isinstance(here, dict):
        here[path[-1]] = value
    else:
        here[:] = [value]
