"""Likeness of a change to a reference, and its size.

Different changes can be right: a low likeness proves nothing against a change that passes hidden
tests. Files are compared as multisets of lines, in linear time whatever they hold.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

Files = Mapping[str, str]
"""Text by path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeQuality:
    """A change, compared with the reference's."""

    files: float
    """F1 of the changed files: 1 if both change the same ones."""
    lines: float
    """F1 of the changed lines."""
    size_ratio: float
    """Changed lines for each one of the reference; above 1 for needless changes."""


def compare_change(before: Files, after: Files, reference: Files) -> ChangeQuality:
    """Compare a change with the reference's.

    Args:
        before: files of the workspace at its start.
        after: files at its end; one that is missing was deleted.
        reference: files of the workspace after the reference.

    Raises:
        ValueError: the reference changes nothing.
    """
    ours, theirs = _changed_lines(before, after), _changed_lines(before, reference)
    if not theirs:
        raise ValueError("the reference changes nothing")
    files, wanted = ({path for path, _, _ in lines} for lines in (ours, theirs))
    return ChangeQuality(
        files=_f1(len(files & wanted), len(files), len(wanted)),
        lines=_f1((ours & theirs).total(), ours.total(), theirs.total()),
        size_ratio=ours.total() / theirs.total(),
    )


def count_changed_lines(before: str, after: str) -> int:
    """Number of lines that are removed or added; moved and blank lines count as neither."""
    return _changed_lines({"": before}, {"": after}).total()


def _changed_lines(before: Files, after: Files) -> Counter[tuple[str, str, str]]:
    """Removed and added lines: path, sign, text without the blanks around it."""
    found: Counter[tuple[str, str, str]] = Counter()
    for path in before.keys() | after.keys():
        old, new = _lines(before.get(path, "")), _lines(after.get(path, ""))
        found.update({(path, "-", text): count for text, count in (old - new).items()})
        found.update({(path, "+", text): count for text, count in (new - old).items()})
    return found


def _lines(text: str) -> Counter[str]:
    return Counter(line.strip() for line in text.splitlines() if line.strip())


def _f1(common: int, ours: int, theirs: int) -> float:
    return 2 * common / (ours + theirs)
