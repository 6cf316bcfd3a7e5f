"""Marks in foreign text where it spells out a token of the tokenizer: it stays text.

A mark splits the spelled token, so that the tokenizer does not recognise it. It is put behind the
first character of each occurrence, and of an unfinished one at the end of the text, which what
follows could complete. Marks are taken out again before the text is encoded.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Final

NONCHARACTER: Final = "\ufdd0"
_SEPARATOR: Final = "\ufdd1"
_RUN = re.compile(f"{NONCHARACTER}+")


def choose_mark(texts: Iterable[str]) -> str:
    """Choose a text that none of the texts holds: nearly always one Unicode noncharacter."""
    runs = _RUN.findall("\n".join(texts))
    if not runs:
        return NONCHARACTER
    # A run one longer than any, and its end: neighbouring noncharacters cannot shift it.
    return NONCHARACTER * (max(map(len, runs)) + 1) + _SEPARATOR


class TokenFinder:
    """Finds occurrences of some tokens' text, in linear time."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self.tokens = frozenset(tokens)
        self._first = {token[0] for token in self.tokens}
        self._pattern = re.compile(_to_pattern(sorted(self.tokens)) if self.tokens else r"(?!)")
        # Occurrences that overlap are all found: each may be the one that the tokenizer takes.
        self._starts = re.compile(f"(?={self._pattern.pattern})")
        self._prefixes = {token[:end] for token in self.tokens for end in range(1, len(token))}
        self._longest = max(map(len, self.tokens), default=0)

    def find(self, text: str, start: int = 0) -> re.Match[str] | None:
        """Find the first occurrence from a position on, the longest if several start there."""
        return self._pattern.search(text, start)

    def plant(self, text: str, mark: str) -> str:
        """Put the mark into every occurrence of a token, and into an unfinished one at the end."""
        places = set(self._unfinished(text))
        if self._pattern.search(text) is not None:
            places.update(match.start() + 1 for match in self._starts.finditer(text))
        if not places:
            return text
        return mark.join(_split(text, sorted(places)))

    def _unfinished(self, text: str) -> Iterator[int]:
        first = max(0, len(text) - self._longest + 1)
        for letter in self._first:
            start = text.find(letter, first)
            while start >= 0:
                if text[start:] in self._prefixes:
                    yield start + 1
                start = text.find(letter, start + 1)


def _split(text: str, places: list[int]) -> Iterator[str]:
    start = 0
    for place in places:
        yield text[start:place]
        start = place
    yield text[start:]


def _to_pattern(tokens: list[str]) -> str:
    """Write sorted tokens as one expression that shares their beginnings: no backtracking."""
    groups: dict[str, list[str]] = {}
    for token in tokens:
        if token:
            groups.setdefault(token[0], []).append(token)
    branches = []
    for first, group in groups.items():
        common = _common_start(group) if len(group) > 1 else first
        if len(group) == 1:
            branches.append(re.escape(group[0]))
            continue
        rest = [token[len(common) :] for token in group]
        # Longest first: the shared text alone is tried last.
        optional = "?" if "" in rest else ""
        branches.append(f"{re.escape(common)}(?:{_to_pattern([r for r in rest if r])}){optional}")
    return "|".join(branches)


def _common_start(tokens: list[str]) -> str:
    first, last = tokens[0], tokens[-1]
    for index, letter in enumerate(first):
        if index >= len(last) or last[index] != letter:
            return first[:index]
    return first
