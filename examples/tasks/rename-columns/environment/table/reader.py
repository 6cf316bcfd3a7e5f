"""Rows of a CSV text as dictionaries."""

import csv
import io


def read_rows(text: str) -> list[dict[str, str]]:
    """One dictionary per line after the header, by the header's names."""
    header, *rows = csv.reader(io.StringIO(text))
    return [dict(zip(header, row, strict=True)) for row in rows]
