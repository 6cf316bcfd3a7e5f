"""The reference pages of the API, of algorithms and of reward functions, from their models."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.common.api.meta import GROUP, VERSION, Model
from etude.common.api.run import algorithms, rewards
from etude.common.api.schema import crd, structural

FOLDER = Path("docs/reference")
COMMAND = "python -m etude.common.api.schema.reference"
GENERATED = f"<!-- Generated from etude.common.api by `{COMMAND}`; do not edit. -->"
API = f"""\
# API reference

{GENERATED}

Group `{GROUP}`, version `{VERSION}`. Fields below `spec` are yours; fields below `status` are \
written by the operator. A field marked **required** has no default. Decimals are text, so that \
they survive every JSON encoder: `"3e-3"`, in quotes. `etude lint FILE…` judges a manifest as the \
API server does, with line, reason and fix; `kubectl explain` prints the same sentences as this \
page.
"""
ALGORITHMS = f"""\
# Algorithms reference

{GENERATED}

What each value of `phases[].algorithm.name` does, and what `phases[].algorithm.parameters` may \
hold then. [Learning](../concepts/learning.md) has the formulas.
"""
REWARDS = f"""\
# Rewards reference

{GENERATED}

What each value of `roles.rewards.functions[].function` measures, and what `parameters` beside it \
may hold. The reward of a rollout is weight x verifier, less the sum of weight x penalty; exactly \
one function is the Verifier.
"""

Schema = Mapping[str, Any]


def pages() -> Mapping[str, str]:
    """Every page by its file name."""
    return {
        "api.md": "\n".join([API, *(part for kind in crd.KINDS for part in _kind(kind))]),
        "algorithms.md": _listed(ALGORITHMS, algorithms.PARAMETERS),
        "rewards.md": _listed(REWARDS, rewards.PARAMETERS),
    }


def _kind(kind: crd.CrdKind) -> Iterator[str]:
    names = f"`{kind.plural}`, short `{kind.short}`, category `etude`"
    yield f"## {kind.name}\n\n{kind.about} Also {names}.\n"
    yield f"### {kind.name}.spec\n\n{_table(structural.schema(kind.spec), 'spec')}"
    rules = [*_rules(structural.schema(kind.spec)), *(rule.message for rule in kind.rules)]
    if rules:
        listed = "\n".join(f"- {message[0].upper()}{message[1:]}." for message in rules)
        yield f"### {kind.name} rules\n\n{listed}\n"
    status = structural.schema(kind.status, defaults=False)
    yield f"### {kind.name}.status\n\n{_table(status, 'status')}"


def _listed(introduction: str, models: Mapping[str, type[Model]]) -> str:
    return "\n".join([introduction, *(_parameters(name, each) for name, each in models.items())])


def _parameters(name: str, model: type[Model]) -> str:
    about = " ".join((model.__doc__ or "").split())
    schema = structural.schema(model)
    if not schema.get("properties"):
        return f"## {name}\n\n{about}\n\nNo parameters.\n"
    return f"## {name}\n\n{about}\n\n{_table(schema, '')}"


def _table(schema: Schema, prefix: str) -> str:
    rows = [
        f"| `{path}` | {_type(node)} | {_default(node, required)} | {_description(node)} |"
        for path, node, required in _fields(schema, prefix)
    ]
    return "\n".join(["| field | type | default | |", "|---|---|---|---|", *rows, ""])


def _fields(schema: Schema, prefix: str) -> Iterator[tuple[str, Schema, bool]]:
    """Every field below a schema: its path, its node, whether it must be given."""
    for name, node in schema.get("properties", {}).items():
        path = f"{prefix}.{name}" if prefix else name
        yield path, node, name in schema.get("required", ())
        yield from _fields(node, path)
        yield from _fields(node.get("items", {}), f"{path}[]")


def _rules(schema: Schema) -> Iterator[str]:
    for rule in schema.get(structural.VALIDATIONS, ()):
        yield rule["message"]
    for child in schema.get("properties", {}).values():
        yield from _rules(child)
        yield from _rules(child.get("items", {}))


def _type(node: Schema) -> str:
    if "enum" in node:
        return " \\| ".join(f"`{value}`" for value in node["enum"])
    if node.get("type") == "array":
        return f"list, {_range(node, 'minItems', 'maxItems')}".rstrip(", ")
    if "additionalProperties" in node:
        return f"map, {_range(node, 'minProperties', 'maxProperties')}".rstrip(", ")
    words = node.get("type") or " or ".join(each["type"] for each in node.get("anyOf", ()))
    limits = _range(node, "minimum", "maximum") or _range(node, "minLength", "maxLength")
    if words == "string" and limits:
        limits += " characters"
    return f"{words}, {limits}" if limits else words


def _range(node: Schema, low: str, high: str) -> str:
    at_least, at_most = node.get(low), node.get(high)
    above = "over " if node.get("exclusiveMinimum") else ""
    if at_least is not None and at_most is not None:
        return f"{above}{_count(at_least)} to {_count(at_most)}"
    if at_most is not None:
        return f"up to {_count(at_most)}"
    return f"{above or 'at least '}{_count(at_least)}" if at_least is not None else ""


def _count(value: float) -> str:
    return f"{int(value):,}" if float(value).is_integer() else f"{value:g}"


def _default(node: Schema, required: bool) -> str:  # noqa: FBT001 one cell from two facts
    if required:
        return "**required**"
    if "default" not in node or node.get("type") == "object":
        return ""  # an object's default is that of its fields
    value = node["default"]
    return f"`{str(value).lower()}`" if isinstance(value, bool) else f"`{value}`"


def _description(node: Schema) -> str:
    return " ".join(node.get("description", "").split()).replace("|", "\\|")


def main(arguments: Sequence[str]) -> None:
    """Write the pages into the folder named, or to their place in the docs."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    folder: Path = parser.parse_args(arguments).folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
