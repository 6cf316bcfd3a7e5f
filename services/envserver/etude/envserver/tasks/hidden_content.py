"""Content of a task that has to stay hidden from the agent, as hashes and sets of lines."""

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

MIN_FILE_BYTES = 16
"""Smaller files are alike by chance."""
_MIN_LINE = 12
_MIN_LONE_LINE = 24
_SHARE = 0.8
"""Of a unit's lines in one place: the agent's files hold single lines of any solution by chance."""
_DIFF = (".patch", ".diff")
_TARGET = re.compile(r"\+\+\+ (?:b/)?([^\t\n]+)")

Files = Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenUnit:
    """Lines of which no single file of the workspace may hold most."""

    rule: str
    name: str
    """File that they come from."""
    lines: tuple[str, ...]
    exempt: tuple[str, ...] = ()
    """SHA-256 of files that they were written against."""

    @property
    def needed(self) -> int:
        """Number of lines that together count as a leak."""
        return max(1, math.ceil(_SHARE * len(self.lines)))


def hidden_hashes(tests: Files, solution: Files) -> dict[str, str]:
    """Names of the hidden files by SHA-256."""
    named = {f"tests/{path}": data for path, data in tests.items()}
    named |= {f"solution/{path}": data for path, data in solution.items()}
    return {_sha256(data): name for name, data in named.items() if len(data) >= MIN_FILE_BYTES}


def hidden_units(workspace: Files, tests: Files, solution: Files) -> list[HiddenUnit]:
    """Lines of the solution and the hidden tests that the workspace's own files do not hold."""
    found = [unit for path, data in solution.items() for unit in _of(path, data, workspace, "gold")]
    found += [unit for path, data in tests.items() for unit in _of(path, data, workspace, "tests")]
    return [unit for unit in found if _is_telling(unit.lines)]


def _of(path: str, data: bytes, workspace: Files, kind: str) -> Iterator[HiddenUnit]:
    folder = "solution" if kind == "gold" else "tests"
    rule, name = f"{kind}-lines", f"{folder}/{path}"
    text = data.decode(errors="replace")
    if path.endswith(_DIFF):
        for target, added in _added(text):
            known = workspace.get(target, b"")
            lines = _lines(added, known)
            yield HiddenUnit(
                rule=rule, name=f"{name} ({target})", lines=lines, exempt=_hash_of(known)
            )
        return
    counterpart = _counterpart(path, workspace)
    mentioned = [
        content for other, content in workspace.items() if PurePosixPath(other).name in text
    ]
    known = workspace.get(counterpart, b"") if counterpart else b""
    exempt = tuple(digest for content in (known, *mentioned) for digest in _hash_of(content))
    yield HiddenUnit(rule=rule, name=name, lines=_lines(text.splitlines(), known), exempt=exempt)


def _added(diff: str) -> Iterator[tuple[str, list[str]]]:
    """Each changed file of a unified diff, with the lines that come to it."""
    target, lines = "", list[str]()
    for line in diff.splitlines():
        match = _TARGET.match(line)
        if match:
            if lines:
                yield target, lines
            target, lines = match[1].strip(), []
        elif line.startswith("+"):
            lines.append(line[1:])
    if lines:
        yield target, lines


def _counterpart(path: str, workspace: Files) -> str:
    """The workspace's file that a solution's file replaces."""
    inside = path.removeprefix("files/")
    if inside in workspace:
        return inside
    same = [other for other in workspace if PurePosixPath(other).name == PurePosixPath(path).name]
    return same[0] if len(same) == 1 else ""


def _lines(lines: Iterable[str], known: bytes) -> tuple[str, ...]:
    present = {line.strip() for line in known.decode(errors="replace").splitlines()}
    stripped = (line.strip() for line in lines)
    telling = {
        line
        for line in stripped
        if len(line) >= _MIN_LINE and line not in present and not line.startswith(("#", "set -"))
    }
    return tuple(sorted(telling))


def _is_telling(lines: tuple[str, ...]) -> bool:
    return len(lines) > 1 or any(len(line) >= _MIN_LONE_LINE for line in lines)


def _hash_of(content: bytes) -> tuple[str, ...]:
    return (_sha256(content),) if content else ()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
