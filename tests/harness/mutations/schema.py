"""Walks the schema of a kind beside an object of it, and makes what lies above a place."""

import copy
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from etude.common.api.schema import crd

Node = Mapping[str, Any]
Steps = tuple[str | int, ...]
_READ: Mapping[str, Any] = yaml.safe_load(
    Path(__file__).with_name("bases.yaml").read_text(encoding="utf-8")
)
BASES: Mapping[str, dict[str, Any]] = _READ["bases"]
VARIANTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = _READ["variants"]
"""By kind and name: paths and what is there instead, for what excludes something of the base."""


class Place(NamedTuple):
    """A place of an object: the way to it, and its schema."""

    steps: Steps
    node: Node

    @property
    def path(self) -> str:
        """As the API server writes it."""
        return dotted(self.steps)


def dotted(steps: Steps) -> str:
    """A way as the API server writes it: spec.phases[0].name."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    return text.removeprefix(".")


def variants(kind: crd.CrdKind) -> tuple[str, ...]:
    """The names of a kind's bases; that of the first is empty."""
    return "", *VARIANTS.get(kind.name, ())


@cache
def _whole(kind: crd.CrdKind, variant: str) -> dict[str, Any]:
    whole = copy.deepcopy(BASES[kind.name])
    steps = {place.path: place.steps for place in _below(_root(kind), whole)}
    for path, value in (VARIANTS[kind.name][variant] if variant else {}).items():
        if value is None:
            found(whole, steps[path][:-1]).pop(steps[path][-1])
        else:
            put(kind, whole, steps[path], copy.deepcopy(value))
    return whole


def base(kind: crd.CrdKind, variant: str = "") -> dict[str, Any]:
    """A copy of the object that changes of a kind are made to."""
    return copy.deepcopy(_whole(kind, variant))


def places(kind: crd.CrdKind, variant: str = "") -> Iterator[Place]:
    """Every place below spec; of a list those entries that the base has, and else the first.

    Of a variant those places alone at which it has something of its own.
    """
    whole, first = _whole(kind, variant), _whole(kind, "")
    for place in _below(_root(kind), whole):
        own = found(whole, place.steps)
        if not variant or (own is not None and found(first, place.steps) != own):
            yield place


def _root(kind: crd.CrdKind) -> Place:
    return Place(("spec",), spec_schema(kind))


@cache
def spec_schema(kind: crd.CrdKind) -> Node:
    """The schema of a kind's spec."""
    root = crd.definition(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    found: Node = root["properties"]["spec"]
    return found


def _below(place: Place, whole: Any) -> Iterator[Place]:
    yield place
    for name, child in place.node.get("properties", {}).items():
        yield from _below(Place((*place.steps, name), child), whole)
    if "items" in place.node:
        for index in range(max(1, len(found(whole, place.steps) or ()))):
            yield from _below(Place((*place.steps, index), place.node["items"]), whole)


def minimal(node: Node) -> Any:
    """The least that a schema takes."""
    if "default" in node or "enum" in node:
        return copy.deepcopy(node["default"] if "default" in node else node["enum"][0])
    match node.get("type"):
        case "object":
            fields = node.get("properties", {})
            return {name: minimal(fields[name]) for name in node.get("required", ())}
        case "array":
            return [minimal(node["items"]) for _ in range(node.get("minItems", 0))]
        case "integer":
            return node.get("minimum", 0)
        case kind:
            return False if kind == "boolean" else "a"


def put(kind: crd.CrdKind, whole: dict[str, Any], steps: Steps, value: Any) -> None:
    """Set one place, and make what lies above it where that is absent."""
    node, here = spec_schema(kind), whole["spec"]
    for step, after in pairwise(steps[1:]):
        node = node["items"] if isinstance(step, int) else node["properties"][step]
        fresh = [] if isinstance(after, int) else minimal(node)
        if isinstance(here, list):
            here += [fresh] if len(here) <= int(step) else []
            here = here[int(step)]
        else:
            here = here.setdefault(step, fresh)
    if isinstance(here, list) and len(here) <= int(steps[-1]):
        here.append(value)
    else:
        here[steps[-1]] = value


def found(whole: Any, steps: Steps) -> Any:
    """What an object has at a place; None where it has nothing."""
    for step in steps:
        try:
            whole = whole[step]
        except (KeyError, IndexError, TypeError):
            return None
    return whole
