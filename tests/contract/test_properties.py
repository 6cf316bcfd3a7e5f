"""Each property that the operator promises is shown by tests, or said to be absent."""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROPERTIES: Mapping[str, Any] = yaml.safe_load(
    Path(__file__).with_name("properties.yaml").read_text(encoding="utf-8")
)
NUMBERED = re.compile(r"^test_p(\d\d)_")


@cache
def functions_of(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in tree.body if isinstance(node, functions))


def shown(number: str) -> Iterator[tuple[str, str]]:
    for file, names in PROPERTIES[number].get("shown", {}).items():
        for name in names:
            yield file, name


def test_there_are_twenty_properties() -> None:
    assert list(PROPERTIES) == [f"P{number}" for number in range(1, 21)]


@pytest.mark.parametrize("number", PROPERTIES)
def test_a_property_is_shown_by_tests_that_exist_or_said_to_be_absent(number: str) -> None:
    assert ("absent" in PROPERTIES[number]) != bool(list(shown(number)))
    assert [name for file, name in shown(number) if name not in functions_of(ROOT / file)] == []


def test_a_test_that_names_a_property_in_its_name_is_listed_under_it() -> None:
    listed = {(file, name): number for number in PROPERTIES for file, name in shown(number)}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        file = str(path.relative_to(ROOT))
        for name in functions_of(path):
            named = NUMBERED.match(name)
            if named is not None:
                assert listed.get((file, name)) == f"P{int(named[1])}", f"{file}::{name}"
