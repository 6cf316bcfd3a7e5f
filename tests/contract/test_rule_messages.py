"""Whoever breaks a rule over several fields reads which fields those are."""

import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from etude.common.api.meta import Model, Rule
from etude.common.api.schema import crd

READ = re.compile(r"\b[a-z]\w*((?:\.[a-zA-Z]\w*)+)(?!\w|\()")
"""A field in CEL, such as self.roles.inference: with a bracket behind it, it is a function."""


def parts(annotation: Any) -> Iterator[Any]:
    """An annotation and everything inside it."""
    yield getattr(annotation, "__origin__", annotation)
    for inner in get_args(annotation):
        yield from parts(inner)


def models(model: type[Model]) -> Iterator[type[Model]]:
    """A model and all that its fields hold."""
    yield model
    for info in model.model_fields.values():
        for part in parts(info.annotation):
            if isinstance(part, type) and issubclass(part, Model):
                yield from models(part)


def fields(rule: Rule) -> set[str]:
    """The last names of everything that a rule reads."""
    return {path.rsplit(".", 1)[-1] for path in READ.findall(rule.cel)}


RULES = {
    f"{model.__name__}: {rule.message[:60]}": rule
    for kind in crd.KINDS
    for model in models(kind.spec)
    for rule in model.rules
}


@pytest.mark.parametrize("about", RULES)
def test_a_refusal_names_every_field_that_its_rule_reads(about: str) -> None:
    rule = RULES[about]
    said = f"{rule.field_path}: {rule.message}"
    assert fields(rule), rule.cel
    assert [name for name in fields(rule) if not re.search(rf"\b{name}\b", said)] == []


def test_the_fields_of_a_rule_are_found() -> None:
    cel = "self.a.all(x, !has(x.first) || size(self.b.second) > x.first.size())"
    rule = Rule(cel=cel, holds=bool, message="", fix="")
    assert fields(rule) == {"a", "first", "second"}
