"""Rules of .gitignore files, as the agent inside sandboxes applies them too.

Patterns may be hostile: a match takes a bounded number of steps, and no pattern becomes a regular
expression.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

IGNORE_FILE = ".gitignore"
MAX_BYTES = 256 << 10
_MAX_RULES = 4096
_MAX_STEPS = 100_000


class IgnoreRule(NamedTuple):
    """One line of a .gitignore."""

    segments: Sequence[bytes]
    is_negated: bool
    is_folder: bool
    """True if it is about folders alone."""
    is_anchored: bool
    """True if it is about whole paths below its own folder, not about names."""

    def matches(self, path: Sequence[bytes]) -> bool:
        """True if a path below the rule's folder matches."""
        steps = _Steps()
        if not self.is_anchored:
            return _match_name(self.segments[0], path[-1], steps)
        return _match_path(self.segments, path, steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class IgnoreRules:
    """Rules of one folder, on top of those of the folders that it is in."""

    above: "IgnoreRules | None" = None
    prefix: bytes = b""
    """Path of the folder with a slash at its end, empty for the root."""
    rules: Sequence[IgnoreRule] = ()

    def ignores(self, path: bytes, *, is_folder: bool) -> bool:
        """True if a rule is about the path, whatever folder it is in.

        The last rule that matches decides, and inner folders come first.
        """
        at: IgnoreRules | None = self
        while at is not None:
            below = path[len(at.prefix) :].split(b"/")
            for rule in reversed(at.rules):
                if (is_folder or not rule.is_folder) and rule.matches(below):
                    return not rule.is_negated
            at = at.above
        return False

    def inside(self, prefix: bytes, text: bytes) -> "IgnoreRules":
        """These rules and those of a .gitignore in a folder below."""
        rules = parse_rules(text[:MAX_BYTES])
        return IgnoreRules(above=self, prefix=prefix, rules=rules) if rules else self


def parse_rules(text: bytes) -> Sequence[IgnoreRule]:
    """Parse the lines of a .gitignore; too many of them are cut off."""
    rules: list[IgnoreRule] = []
    for line in text.split(b"\n"):
        if len(rules) >= _MAX_RULES:
            break
        rule = _parse_rule(line.removesuffix(b"\r"))
        rules += [] if rule is None else [rule]
    return rules


def _parse_rule(line: bytes) -> IgnoreRule | None:
    while line.endswith(b" ") and not line.endswith(b"\\ "):
        line = line[:-1]
    if not line or line.startswith(b"#"):
        return None
    is_negated = line.startswith(b"!")
    line = line[1:] if is_negated else line
    is_folder = line.endswith(b"/")
    line = line[:-1] if is_folder else line
    segments = line.removeprefix(b"/").split(b"/")
    if segments == [b""]:
        return None
    return IgnoreRule(segments, is_negated, is_folder, b"/" in line)


@dataclass(slots=True)
class _Steps:
    """Steps that are left of a match."""

    left: int = _MAX_STEPS

    def take(self) -> bool:
        self.left -= 1
        return self.left >= 0


def _match_path(pattern: Sequence[bytes], path: Sequence[bytes], steps: _Steps) -> bool:
    """Match segments: `**` is any number of them, and at the end at least one."""
    p = at = start = 0
    star = -1
    while at < len(path):
        if p < len(pattern) and pattern[p] == b"**":
            if p == len(pattern) - 1:
                return True
            star, start = p, at
            p += 1
        elif p < len(pattern) and _match_name(pattern[p], path[at], steps):
            p, at = p + 1, at + 1
        elif star >= 0:
            start += 1
            p, at = star + 1, start
        else:
            return False
        if not steps.take():
            return False
    return p == len(pattern)


def _match_name(pattern: bytes, name: bytes, steps: _Steps) -> bool:
    """Match one segment: `*`, `?`, `[…]` and a backslash, as fnmatch(3) does."""
    p = at = start = 0
    star = -1
    while at < len(name):
        if not steps.take():
            return False
        if pattern[p : p + 1] == b"*":
            star, start = p, at
            p += 1
            continue
        width = _match_letter(pattern[p:], name[at])
        if width:
            p, at = p + width, at + 1
        elif star >= 0:
            start += 1
            p, at = star + 1, start
        else:
            return False
    return not pattern[p:].strip(b"*")


def _match_letter(pattern: bytes, letter: int) -> int:
    """Length of the pattern's beginning that matches one byte; 0: it does not."""
    match pattern[:1]:
        case b"":
            return 0
        case b"?":
            return 1
        case b"\\":
            return 2 if len(pattern) > 1 and pattern[1] == letter else 0
        case b"[":
            return _match_class(pattern, letter)
        case _:
            return int(pattern[0] == letter)


def _match_class(pattern: bytes, letter: int) -> int:
    is_negated = pattern[1:2] in {b"!", b"^"}
    at = first = 2 if is_negated else 1
    is_in = False
    while at < len(pattern) and (at == first or pattern[at : at + 1] != b"]"):
        low, width = _class_letter(pattern[at:])
        at += width
        high = low
        if pattern[at : at + 1] == b"-" and pattern[at + 1 : at + 2] not in {b"", b"]"}:
            high, width = _class_letter(pattern[at + 1 :])
            at += 1 + width
        is_in = is_in or low <= letter <= high
    # A class without an end matches nothing.
    return at + 1 if at < len(pattern) and is_in != is_negated else 0


def _class_letter(pattern: bytes) -> tuple[int, int]:
    if pattern[:1] == b"\\" and len(pattern) > 1:
        return pattern[1], 2
    return pattern[0], 1
