"""Values to try at a place of a schema: bounds, texts, floats, and what is none of these."""

import copy
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.harness.mutations.schema import Node, minimal

ABSENT = object()
"""Takes a field away."""


class Raw(str):
    """A number as JSON text, for those that Python's floats do not write."""

    __slots__ = ()


NUMBERS = (Raw("1e309"), Raw("-1e309"), Raw("1e-320"), Raw("-0"), Raw("1.0"), Raw("1e2"), 0.5)
WHOLE = (-1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 10**40)
DECIMALS = (
    *("0", "-0", "+1", "0.0", "1", "0.5", "1.0", "1.", ".5", "0.1e1", "1E5", "1e99", "1e-99"),
    *("1e308", "1e309", "1e-320", "1e999", "NaN", "nan", "Infinity", "-Infinity", "0x1", "1_0"),
    *("1,5", "\u0661", "\uff11", "0.30000000000000004", "9" * 32, "9" * 33, "1e5e5", " 1", "1\n"),
)
QUANTITIES = (
    *("0", "1", "2.5", "100m", "0.0001", "1.0005", "1.5.Gi", "1.5Gi", "1Ki", "64Mi", "1Gi"),
    *("007Gi", "1Ti", "1Pi", "1K", "-1", "1e3", "1n", "Gi", "1 Gi", "9" * 32, "1GiB", "\u0661Gi"),
)
NAMES = (
    *("a", "a-1", "x" * 40, "x" * 41, "x" * 63, "x" * 64, "x" * 253, "x" * 254),
    *("a.b", "A", "-a", "a-", "a_b", "a b", "\u00e9t\u00e9", "a\n", "a/b", "a..b", "con", "1a"),
)
ADDRESSES = (
    *("s3://b", "s3://", "s3://b/k", "s3://b/\u00fc", "s3://b/a b", "s3://b/../x", "file:///x"),
    *("file://", "ftp://b/k", "http://h", "http://h:99999", "https://h:1/x", "http:///x", "h:4317"),
    *("http://[::1]:4317", "http://h/%00", "s3://b/" + "x" * 1_017, "s3://b/" + "x" * 1_018),
)
WORDS = (
    *("", " ", "\u0000", "\u00e9", "\U0001f600", "a\nb", "{{.}}", "$(HOME)", "null", "true", "~"),
    *("*.a.org", "a.org", "/a/", "/a b", "amd.com/gpu", "gpu", "Ready", "etude.dev/operator"),
    *("registry.example/a@sha256:" + "0" * 64, "a" * 64, "A" * 64, "eu 1", "hashed-1", "trained-a"),
    *("X-Key", "Host", "Cookie", "q.1", "\u202eabc", "a" * 5_000),
)
POOL = (*DECIMALS, *QUANTITIES, *NAMES, *ADDRESSES, *WORDS)
KEYS = ("a", "example.com/a", "bad key/!", "", "\u00e9", "x" * 64, "x" * 254, "/a", "a/b/c")
WRONG: Mapping[str, tuple[Any, ...]] = {
    "object": ([], "a", 1, None),
    "array": ({}, "a", 1, None),
    "string": (1, True, [], {}, None, 1.5),
    "integer": ("1", True, [], None, *NUMBERS),
    "boolean": ("true", 0, None, []),
}


def values(node: Node, present: Any, rng: random.Random) -> Iterator[tuple[str, Any]]:
    """What to put in a place that holds `present`, each with a word for it."""
    kind = node.get("type", "")
    if "enum" in node:
        yield from (("a word of the enumeration", word) for word in node["enum"])
        yield from (("no word of the enumeration", word) for word in ("", "None ", "nonesuch"))
    elif kind == "string":
        yield from _texts(node, rng)
    elif kind == "integer":
        yield from _integers(node)
    elif kind == "boolean":
        yield from (("the other truth", each) for each in (True, False) if each is not present)
    elif kind == "array":
        yield from _lists(node, present if isinstance(present, list) else [])
    elif "properties" in node:
        yield from (("nothing in it", {}), ("an unknown field", {**(present or {}), "nonesuch": 1}))
    elif "additionalProperties" in node:
        yield from _mappings(node, rng)
    yield from (
        ("a wrong type", copy.deepcopy(each)) for each in _some(WRONG.get(kind, ()), 2, rng)
    )


def _some(given: Sequence[Any], count: int, rng: random.Random) -> list[Any]:
    return rng.sample(given, min(count, len(given)))


def _texts(node: Node, rng: random.Random) -> Iterator[tuple[str, Any]]:
    fits = [text for text in POOL if _fits(text, node)]
    misfits = [text for text in POOL if not _fits(text, node)]
    yield from (("a text that fits", text) for text in _some(fits, 3, rng))
    yield from (("a text that does not fit", text) for text in _some(misfits, 3, rng))
    longest = node.get("maxLength", 0)
    yield "a text that is too long", "a" * (longest + 1)
    if _fits("a" * longest, node):
        yield "the longest text", "a" * longest


def _fits(text: str, node: Node) -> bool:
    is_short = node.get("minLength", 0) <= len(text) <= node.get("maxLength", len(text))
    return is_short and re.search(node.get("pattern", ""), text) is not None


def _integers(node: Node) -> Iterator[tuple[str, Any]]:
    low, high = node.get("minimum"), node.get("maximum")
    if low is not None:
        yield from (("the least number", low), ("less than the least number", low - 1))
    if high is not None:
        yield from (("the greatest number", high), ("more than the greatest number", high + 1))
        yield "a number between", low + (high - low) // 7 if low is not None else high // 7
    else:
        yield from (("a large number", each) for each in WHOLE)


def _lists(node: Node, present: list[Any]) -> Iterator[tuple[str, Any]]:
    one = present[0] if present else minimal(node["items"])
    yield "an empty list", []
    yield "the last entry gone", present[:-1]
    yield "an entry twice", [*present, copy.deepcopy(one)]
    yield "the entries turned round", present[::-1]
    yield "an entry more", [*present, _other(one)]
    yield "an empty entry", [*present, None]
    most = node.get("maxItems")
    if most is not None and most <= 128:
        yield "as many entries as may be", [_other(one, number) for number in range(most)]
        yield "too many entries", [_other(one, number) for number in range(most + 1)]


def _other(entry: Any, number: int = 99) -> Any:
    """An entry like another one, under a name of its own."""
    if isinstance(entry, dict) and "name" in entry:
        return {**copy.deepcopy(entry), "name": f"n{number}"}
    return number if isinstance(entry, int) else copy.deepcopy(entry)


def _mappings(node: Node, rng: random.Random) -> Iterator[tuple[str, Any]]:
    inner = node["additionalProperties"]
    fill = "a" if inner.get("type") == "string" else 1
    yield "an empty mapping", {}
    yield from (("a key", {key: fill}) for key in rng.sample(KEYS, 4))
    yield "a key of nothing", {"a": None}
    yield from (("a value", {"a": text}) for text in rng.sample(WORDS, 2))
    most = node.get("maxProperties", 0)
    yield "as many keys as may be", {f"k{number}": fill for number in range(most)}
    yield "too many keys", {f"k{number}": fill for number in range(most + 1)}
