"""Patterns on RE2: no text of a user can make them slow. They match bytes of UTF-8."""

import re
from typing import Protocol

import re2  # type: ignore[import-untyped]  # google-re2 ships no type information


class Pattern(Protocol):
    """The part of a compiled pattern that is used here."""

    def search(self, text: bytes, pos: int | None = None) -> re.Match[bytes] | None:
        """First match from a position on; None for none."""
        ...

    def fullmatch(self, text: bytes) -> re.Match[bytes] | None:
        """Match of the whole text; None for none."""
        ...


def compile_pattern(pattern: str) -> Pattern:
    """Compile a pattern."""
    compiled: Pattern = re2.compile(pattern)
    return compiled


def compile_words(words: list[bytes]) -> Pattern:
    """Pattern of any of some words."""
    return compile_pattern("|".join(re2.escape(word.decode()) for word in words))
