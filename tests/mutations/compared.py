"""What two descriptions of the same thing differ in, in words."""

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from etude.operator.manifests import quantity


def unequal(what: str, wanted: object, found: object) -> Iterator[str]:
    """Whether two things are the same."""
    if wanted != found:
        yield f"{what}: {_short(wanted)} shows as {_short(found)}"


def lacking(what: str, wanted: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """What one mapping has and another one has not."""
    for key, value in wanted.items():
        if isinstance(value, Mapping) and isinstance(found.get(key), Mapping):
            yield from lacking(f"{what}.{key}", value, found[key])
        elif not (key in found and found[key] == value) and value not in ({}, []):
            yield f"{what}.{key}: {_short(value)} shows as {_short(found.get(key))}"


def same_amount(what: str, wanted: str, found: str) -> Iterator[str]:
    """Whether two quantities are the same; Kubernetes rounds up to a thousandth."""
    amounts = [quantity(wanted), quantity(found)]
    if not all(isinstance(each, Decimal) for each in amounts):
        yield f"{what}: {wanted} shows as {found}"
        return
    asked, live = (Decimal(each) for each in amounts)
    if not 0 <= live - asked < Decimal("0.001"):
        yield f"{what}: {wanted} shows as {found}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 600 else f"{text[:300]} … {text[-300:]}"
