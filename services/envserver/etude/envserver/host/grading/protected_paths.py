"""Protected paths of grading: what an agent's change may not touch becomes what it was at first.

Settings files that the test runner shares with other programs keep the agent's version, unless the
part for the runner differs or cannot be read.
"""

import configparser
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from etude.agent import patterns
from etude.common.errors import InvalidFieldError
from etude.envserver.storage.trees import File, Tree

_Part = Callable[[str], object]


def restore_protected(
    first: Tree, changed: Tree, protected: Iterable[str], allowed: Iterable[str]
) -> dict[str, File]:
    """A changed tree with its protected paths as they were in the first one.

    Raises:
        InvalidFieldError: a pattern is invalid.
    """
    is_protected = path_matcher(protected, "protected_paths")
    is_allowed = path_matcher(allowed, "allowed_paths")
    result = dict(changed)
    for path in sorted({*first, *changed}):
        before, after = first.get(path), changed.get(path)
        if before == after or not is_protected(path) or is_allowed(path):
            continue
        if _keeps_runner_part(path, before, after):
            continue
        if before is None:
            del result[path]
        else:
            result[path] = before
    return _without_collisions(first, result)


def _without_collisions(first: Tree, result: dict[str, File]) -> dict[str, File]:
    """Drop the agent's files that stand where a restored path needs a folder, and the reverse."""
    folders = {
        parent for path in result for parent in _parents(path) if path in first and parent in result
    }
    for path in folders:
        del result[path]
    taken = {path for path in result if path in first}
    return {p: f for p, f in result.items() if p in first or taken.isdisjoint(_parents(p))}


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


def path_matcher(globs: Iterable[str], field: str) -> Callable[[str], bool]:
    """Tell whether a path matches one of these patterns.

    Raises:
        InvalidFieldError: a pattern is invalid.
    """
    try:
        matchers = [patterns.glob_matcher(glob) for glob in globs]
    except patterns.PatternError as error:
        raise InvalidFieldError(field, str(error)) from error

    def matches(path: str) -> bool:
        encoded = path.encode("utf-8", "surrogateescape")
        return any(matcher.fullmatch(encoded) for matcher in matchers)

    return matches


def _keeps_runner_part(path: str, before: File | None, after: File | None) -> bool:
    """True if a change of shared settings leaves the part for the test runner as it was."""
    read = _RUNNER_PARTS.get(path.rpartition("/")[2])
    if read is None or after is None:
        return False
    try:
        old = read("" if before is None else before.content.decode())
        return read(after.content.decode()) == old
    except (ValueError, RecursionError, configparser.Error):
        return False


def _pyproject(text: str) -> object:
    tools = tomllib.loads(text).get("tool", {})
    return [tools.get(name) for name in ("pytest", "tox", "nox")]


def _setup_cfg(text: str) -> object:
    parser = configparser.RawConfigParser()
    parser.read_string(text)
    names = ("tool:pytest", "pytest", "aliases", "options.entry_points")
    return [dict(parser[name]) if parser.has_section(name) else None for name in names]


def _package_json(text: str) -> object:
    content = json.loads(text or "{}")
    return [content.get(name) for name in ("scripts", "jest", "mocha", "vitest", "type")]


_RUNNER_PARTS: Mapping[str, _Part] = MappingProxyType(
    {"pyproject.toml": _pyproject, "setup.cfg": _setup_cfg, "package.json": _package_json}
)
