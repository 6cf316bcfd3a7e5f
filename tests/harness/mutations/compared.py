"""What two descriptions of the same thing differ in, in words."""

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from etude.operator.manifests import parse_quantity


def unequal(what: str, wanted: object, found: object) -> Iterator[str]:
    """Whether two things are the same."""
    if wanted != found:
        yield f"{what}: {_short(wanted)} shows as {_short(found)}"


def lacking(what: str, wanted: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """What one mapping has and another one has not; the other one may have more, also in lists."""
    for key, value in wanted.items():
        if value not in ({}, []):
            yield from _lacking(f"{what}.{key}", value, found.get(key))


def _lacking(what: str, wanted: object, found: object) -> Iterator[str]:
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        yield from lacking(what, wanted, found)
    elif isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        for number, (one, other) in enumerate(zip(wanted, found, strict=True)):
            yield from _lacking(f"{what}[{number}]", one, other)
    else:
        yield from unequal(what, wanted, found)


def same_amount(what: str, wanted: str, found: str) -> Iterator[str]:
    """Whether two quantities are the same; Kubernetes rounds up to a thousandth."""
    amounts = [parse_quantity(wanted), parse_quantity(found)]
    if not all(isinstance(each, Decimal) for each in amounts):
        yield f"{what}: {wanted} shows as {found}"
        return
    asked, live = (Decimal(each) for each in amounts)
    if not 0 <= live - asked < Decimal("0.001"):
        yield f"{what}: {wanted} shows as {found}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 600 else f"{text[:300]} … {text[-300:]}"
