"""Changes of a family: its files before and after the reference, from diffs with full context.

A line of a diff begins with a blank where both have it, with - where only the first files have it
and with + where only the reference has it. Words such as $item are replaced in both.
"""

import importlib.resources
from collections.abc import Iterator, Mapping
from importlib.resources.abc import Traversable
from string import Template
from typing import NamedTuple

PACKAGE = "package"
"""Folder of the package's modules among the diffs."""
_SUFFIX = ".diff"


class FileChange(NamedTuple):
    """One file before and after the reference; equal where the reference leaves it alone."""

    path: str
    before: str
    after: str

    @property
    def is_changed(self) -> bool:
        return self.before != self.after


def read_changes(family: str, words: Mapping[str, str]) -> Iterator[FileChange]:
    """Every file of a family, with its words filled in."""
    root = importlib.resources.files(__package__) / "changes" / family
    for folder in sorted(root.iterdir(), key=lambda each: each.name):
        for file in sorted(folder.iterdir(), key=lambda each: each.name):
            yield _read_change(folder.name, file, words)


def split_diff(diff: str) -> tuple[str, str]:
    """Text before and after.

    Raises:
        ValueError: a line has none of the three marks.
    """
    before, after = [], []
    for number, line in enumerate(diff.splitlines(keepends=True), 1):
        mark, text = (line[0], line[1:]) if line.strip() else (" ", "\n")
        if mark not in " -+":
            raise ValueError(f"line {number} begins with {mark!r}")
        if mark != "+":
            before.append(text)
        if mark != "-":
            after.append(text)
    return "".join(before), "".join(after)


def _read_change(folder: str, file: Traversable, words: Mapping[str, str]) -> FileChange:
    name = file.name.removesuffix(_SUFFIX)
    target = words["package"] if folder == PACKAGE else folder
    before, after = split_diff(file.read_text(encoding="utf-8"))
    return FileChange(
        f"{target}/{name}",
        Template(before).substitute(words),
        Template(after).substitute(words),
    )
