"""Pydantic models whose JSON schemas carry the docstrings of fields."""

import ast
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from typing_extensions import override


class DocumentedModel(BaseModel):
    """Base of models that are cheap to import.

    Every process loads all models, but few validate a value, and fewer need a schema. So validators
    are built for the first value (`defer_build`), and docstrings are read from the source for a
    schema, where `use_attribute_docstrings` reads them at each import.
    """

    model_config = ConfigDict(defer_build=True)

    @classmethod
    @override
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler, /
    ) -> JsonSchemaValue:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, said in _sentences(cls).items():
            alias = cls.model_fields[name].alias
            key = alias if alias in properties else name
            if key in properties:
                properties[key] = {"description": said} | properties[key]
        return schema


def _sentences(model: type[BaseModel]) -> dict[str, str]:
    """The docstring of each field, from the last class that has one."""
    found: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if issubclass(cls, DocumentedModel):
            said = _of_module(cls.__module__).get(cls.__qualname__, {})
            for name in inspect.get_annotations(cls):
                found.pop(name, None)
            found |= said
    return {name: said for name, said in found.items() if name in model.model_fields}


@functools.cache
def _of_module(name: str) -> Mapping[str, Mapping[str, str]]:
    """The field docstrings of every class of a module, by its qualified name.

    Raises:
        OSError: there is no source: better no schema than one without descriptions.
    """
    tree = ast.parse(inspect.getsource(sys.modules[name]))
    return {
        qualified: _under_fields(definition) for qualified, definition in _classes(tree.body, "")
    }


def _classes(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.ClassDef]]:
    for node in body:
        match node:
            case ast.ClassDef():
                yield prefix + node.name, node
                yield from _classes(node.body, f"{prefix}{node.name}.")
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from _classes(node.body, f"{prefix}{node.name}.<locals>.")
            case _:
                pass


def _under_fields(definition: ast.ClassDef) -> dict[str, str]:
    found = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(said))),
            ):
                found[name] = inspect.cleandoc(said)
            case _:
                pass
    return found
