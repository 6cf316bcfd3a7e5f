"""No dead knobs: every field of every spec is read by the module that says so."""

import ast
import importlib.util
import re
import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest

from etude.common.api.meta import Model
from etude.common.api.schema import crd

KNOBS: dict[str, dict[str, str]] = {
    kind: readers
    for file in ("knobs.py", "serving_knobs.py")
    for kind, readers in runpy.run_path(str(Path(__file__).with_name(file)))["KNOBS"].items()
}


def fields(model: type[Model], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every field path of a spec that holds no further model, with its name in Python."""
    for name, info in model.model_fields.items():
        path = f"{prefix}{info.alias}"
        nested = [each for each in parts(info.annotation) if is_model(each)]
        is_list = any(each is tuple for each in parts(info.annotation))
        for inner in nested:
            yield from fields(inner, f"{path}[]." if is_list else f"{path}.")
        if not nested:
            yield path, name


def parts(annotation: Any) -> Iterator[Any]:
    """An annotation and everything inside it."""
    yield getattr(annotation, "__origin__", annotation)
    for inner in get_args(annotation):
        yield from parts(inner)


def is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Model)


SPEC_FIELDS = [
    pytest.param(kind, path, name, id=f"{kind.name}.{path}")
    for kind in crd.KINDS
    for path, name in fields(kind.spec)
]


@cache
def reads(module: str) -> frozenset[str]:
    """Every dotted expression that a module reads; of a package, that of all its modules."""
    found = importlib.util.find_spec(module)
    assert found is not None, f"{module} does not exist"
    assert found.origin is not None
    origin = Path(found.origin)
    sources = origin.parent.glob("*.py") if origin.name == "__init__.py" else [origin]
    trees = [ast.parse(source.read_text(encoding="utf-8")) for source in sources]
    return frozenset(
        f".{ast.unparse(node)}"
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    )


def parent(path: str) -> str:
    """The name from which a field is read unless the table has another: its parent's."""
    owner = path.split(".")[-2] if "." in path else "spec"
    words = re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", owner)
    return words.removesuffix("s[]").removesuffix("[]")


@pytest.mark.parametrize(("kind", "path", "name"), SPEC_FIELDS)
def test_every_field_is_read_where_the_table_says(kind: crd.CrdKind, path: str, name: str) -> None:
    where = KNOBS[kind.name].get(path)
    assert where is not None, f"{path} has no entry in knobs.py: a knob without effect?"
    module, _, owner = where.partition(" ")
    if module == "column":
        shown = {column.name: column.path for column in kind.columns}
        assert shown.get(owner) == f".spec.{path}"
    elif module != "people":
        wanted = f".{owner or parent(path)}.{name}"
        assert any(read.endswith(wanted) for read in reads(module)), f"{module} reads no {wanted}"


@pytest.mark.parametrize("kind", crd.KINDS, ids=lambda kind: kind.name)
def test_the_table_names_no_field_that_is_gone(kind: crd.CrdKind) -> None:
    assert set(KNOBS[kind.name]) - {path for path, _ in fields(kind.spec)} == set()
