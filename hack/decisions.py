"""Generator of docs/adr/README.md from the titles of decisions: `python hack/decisions.py`."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FOLDER = Path("docs") / "adr"
HEAD = """\
# Decisions

<!-- Generated from the titles by `python hack/decisions.py`; do not edit. -->

One choice a page: a summary, the context, the choice, its consequence, and what would reverse it. A
body is superseded by a new page, never edited; bodies use the words of their time.
"""


class Decision(NamedTuple):
    """One page."""

    number: int
    title: str
    file: str


def decisions(root: Path) -> Iterator[Decision]:
    """All decisions by number.

    Raises:
        ValueError: a page does not begin with the number that its file has, or two have one number.
    """
    known: dict[int, str] = {}
    for page in sorted((root / FOLDER).glob("[0-9]*.md")):
        first = page.read_text(encoding="utf-8").partition("\n")[0]
        match = re.fullmatch(r"# (\d+)\. (.+)", first)
        if match is None or int(match[1]) != int(page.name[:4]):
            raise ValueError(f"{page.name} begins with {first!r}")
        number = int(match[1])
        if number in known:
            raise ValueError(f"{page.name} has the number of {known[number]}: give it the next one")
        known[number] = page.name
        yield Decision(number, match[2], page.name)


def page(root: Path) -> str:
    """The page as Markdown."""
    pages = list(decisions(root))
    rows = [f"| {each.number} | [{each.title}]({each.file}) |" for each in pages]
    missing = sorted(set(range(1, pages[-1].number)) - {each.number for each in pages})
    unused = f"Unused numbers: {', '.join(map(str, missing))}.\n"
    return "\n".join([HEAD, "| | decision |", "|---|---|", *rows, "", unused])


if __name__ == "__main__":
    (FOLDER / "README.md").write_text(page(Path()), encoding="utf-8")
