"""Rows of a CSV text as dictionaries."""

import csv
import io
import itertools
from collections.abc import Sequence


def read_rows(text: str) -> list[dict[str, str]]:
    """One dictionary per line after the header, by names that differ."""
    header, *rows = csv.reader(io.StringIO(text))
    names = distinct(header)
    return [dict(zip(names, row, strict=True)) for row in rows]


def distinct(header: Sequence[str]) -> list[str]:
    """The names, numbered from 2 where one comes again; a number in use is skipped."""
    taken = set(header)
    found: list[str] = []
    for name in header:
        if name in found:
            numbered = (f"{name}_{number}" for number in itertools.count(2))
            free = next(each for each in numbered if each not in taken)
            taken.add(free)
        else:
            free = name
        found.append(free)
    return found
