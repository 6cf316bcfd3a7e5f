"""Patches in git's or diff's unified form, cut into those of single files."""

import itertools
import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")


class FilePatch(NamedTuple):
    """Change of one file."""

    path: str
    """After the change; before it for a deleted file."""
    text: str

    @property
    def is_test(self) -> bool:
        """True if it looks like a test: by its name, or by a folder above it."""
        name = PurePosixPath(self.path)
        return (
            name.name.startswith("test_")
            or name.stem.endswith("_test")
            or bool({"test", "tests"} & {*name.parts[:-1]})
        )


def split_patch(patch: str) -> list[FilePatch]:
    """Cut a patch at the heads of its files; text before the first one is left out.

    Blank lines of context lose their single space, which git takes as well: then the patch can
    stand in YAML as a block.
    """
    return [FilePatch(_find_path(lines), "\n".join(lines) + "\n") for lines in _sections(patch)]


def join_patches(patches: list[FilePatch]) -> str:
    """One patch of several, in their order."""
    return "".join(each.text for each in patches)


def _sections(patch: str) -> Iterator[list[str]]:
    section: list[str] = []
    old = new = 0
    """Lines that are left in the hunk."""
    # Not splitlines(): for git, lines end at "\n" alone.
    for line in patch.removesuffix("\n").split("\n"):
        if old > 0 or new > 0:
            old -= not line.startswith(("+", "\\"))
            new -= not line.startswith(("-", "\\"))
            section.append("" if line == " " else line)
            continue
        is_plain_head = line.startswith("--- ") and not (
            section and section[-1].startswith("index ")
        )
        if line.startswith("diff --git ") or (is_plain_head and _has_hunk(section)):
            if section:
                yield section
            section = [line]
        elif hunk := _HUNK.match(line):
            old, new = (1 if count is None else int(count) for count in hunk.groups())
            section.append(line)
        elif section or is_plain_head:
            section.append(line)
    if section:
        yield section


def _has_hunk(section: list[str]) -> bool:
    """True if a head of diff begins another file: git's own head stands before the first hunk."""
    return not section or any(line.startswith("@@ ") for line in section)


def _find_path(lines: list[str]) -> str:
    head = itertools.takewhile(lambda line: not line.startswith("@@ "), lines)
    paths = [
        line[4:].partition("\t")[0].strip() for line in head if line.startswith(("--- ", "+++ "))
    ]
    if not paths and lines[0].startswith("diff --git "):  # a change of mode, or an empty file
        paths = [lines[0].rpartition(" b/")[2]]
    named = [path for path in paths if path != "/dev/null"]
    return re.sub(r"^[ab]/", "", named[-1]) if named else ""
