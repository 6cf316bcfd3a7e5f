"""Facts about the calls of a rollout: edits, reads, test runs, lints and to-dos.

They rest on the results that the tools gave, not on what the policy says about them.
"""

import json
import posixpath
import re
import shlex
from typing import NamedTuple

from etude.v1 import rollout_pb2

EDITS = frozenset({"search_replace", "write_file", "delete_file", "apply_patch"})
READS = frozenset({"read_file"})
TERMINAL = "run_terminal"

TEST_FAILED = re.compile(r"^FAILED\b|\b[1-9][0-9]* (failed|error)", re.MULTILINE)
_TEST_PASSED = re.compile(
    r"\b[1-9]\d* (?:passed|passing)\b|^OK\b|^ok\s+\S|^PASS\b|\btest result: ok\b", re.MULTILINE
)
_NOT_PASSED = re.compile(r"^(?:--- )?FAIL\b|\bnot ok\b|^Traceback \(most recent", re.MULTILINE)
_ENDED_BADLY = re.compile(r"^\[(?:exit code|stopped)\b", re.MULTILINE)
_LINT_ROW = r"^{path}:\d+:\d+: "
_OPEN_TODOS = re.compile(r"^\d+ todos, (\d+) open:")
_PATCHED = re.compile(r"^(---|\+\+\+) ([^\t\n]+)", re.MULTILINE)
_ASKS = re.compile(
    r"\?\W*$|\b(?:please (?:clarify|confirm|specify|provide|tell)|let me know (?:which|what|how)|"
    r"(?:could|can|would) you (?:please |clarify|confirm|specify|provide|tell)|do you want|"
    r"should i|waiting for your|need(?: more)? clarification)\b",
    re.IGNORECASE,
)

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_WRAPPERS = (("uv", "run"), ("poetry", "run"), ("bundle", "exec"), ("npx",), ("env",), ("time",))
_HARMLESS = frozenset({"cd", "export", "set", "source", ".", "true", "head", "tail", "tee"})
"""Programs that may stand in a command whose output is evidence: they print no verdict."""
_SHOWING = frozenset({"cat", "sed", "head", "tail", "less", "more", "nl", "awk", "grep", "rg"})

TESTS = (
    *(("pytest",), ("py.test",), ("tox",), ("nox",), ("jest",), ("vitest",), ("ctest",)),
    *(("rspec",), ("go", "test"), ("cargo", "test"), ("npm", "test"), ("npm", "run", "test")),
    *(("yarn", "test"), ("pnpm", "test"), ("make", "test"), ("make", "check"), ("mvn", "test")),
    *(("gradle", "test"), ("dotnet", "test"), ("python", "-m", "pytest")),
    ("python", "-m", "unittest"),
)
"""Beginnings of commands that run tests."""
LINTERS = (
    *(("ruff",), ("flake8",), ("pylint",), ("mypy",), ("pyright",), ("eslint",), ("tsc",)),
    *(("cargo", "clippy"), ("go", "vet"), ("golangci-lint",), ("make", "lint")),
    *(("npm", "run", "lint"), ("python", "-m", "ruff"), ("python", "-m", "mypy")),
)
"""Beginnings of commands that look for defects without running the program."""
BUILDS = (
    *(("make",), ("cmake",), ("cargo", "build"), ("cargo", "check"), ("go", "build"), ("tsc",)),
    *(("npm", "run", "build"), ("yarn", "build"), ("mvn",), ("gradle",), ("gcc",), ("javac",)),
    *(("python", "-m", "compileall"), ("python", "-m", "py_compile"), ("python", "-m", "build")),
)
"""Beginnings of commands that build."""
Beginnings = tuple[tuple[str, ...], ...]


class Edit(NamedTuple):
    """A change of one file that a call made."""

    path: str
    is_new: bool
    """True if the call created the file."""


def argument(call: rollout_pb2.CallRecord, name: str) -> str:
    """A text argument of a call without space around it; empty if it has none."""
    try:
        arguments = json.loads(call.arguments_json or "{}")
    except (ValueError, RecursionError):
        return ""
    value = arguments.get(name, "") if isinstance(arguments, dict) else ""
    return value.strip() if isinstance(value, str) else ""


def edits(call: rollout_pb2.CallRecord) -> tuple[Edit, ...]:
    """Changes of files by a call of an edit tool; none if the tool refused it."""
    if call.name not in EDITS or call.is_error or call.is_malformed:
        return ()
    if call.name != "apply_patch":
        is_new = call.name == "write_file" and call.result.startswith("Created ")
        return (Edit(_normal_path(argument(call, "path")), is_new),)
    found: dict[str, Edit] = {}
    before = ""
    for sign, path in _PATCHED.findall(argument(call, "patch")):
        if sign == "---":
            before = path.strip()
            continue
        after = path.strip()
        changed = before if after == "/dev/null" else after
        edit = Edit(_normal_path(re.sub(r"^[ab]/", "", changed)), before == "/dev/null")
        found.setdefault(edit.path, edit)
    return tuple(found.values())


def shows_file(call: rollout_pb2.CallRecord, path: str) -> bool:
    """True if a call showed lines of a file to the policy."""
    if call.is_error or call.is_malformed:
        return False
    if call.name in READS:
        return _normal_path(argument(call, "path")) == path
    if call.name in {"grep", "codebase_search"}:
        return path in call.result
    if call.name != TERMINAL:
        return False
    commands = split_commands(argument(call, "command"))
    return any(
        command[0] in _SHOWING and path in map(_normal_path, command[1:]) for command in commands
    )


def has_lints(call: rollout_pb2.CallRecord, path: str) -> bool:
    """True if a call's result lists a diagnostic of a file."""
    return re.search(_LINT_ROW.format(path=re.escape(path)), call.result, re.MULTILINE) is not None


def reports_lints(call: rollout_pb2.CallRecord, path: str) -> bool:
    """True if a call's result would list the diagnostics of a file, had it any."""
    if any(edit.path == path for edit in edits(call)):
        return True
    if call.name != "read_lints" or call.is_error or call.is_malformed:
        return False
    return path in map(_normal_path, _texts(call, "paths"))


def count_open_todos(call: rollout_pb2.CallRecord) -> int | None:
    """Number of open to-dos in the list that a call left; None if the call is about no list."""
    if call.name != "todo_write" or call.is_error or call.is_malformed:
        return None
    found = _OPEN_TODOS.match(call.result)
    return int(found[1]) if found else 0


def asks_question(message: str) -> bool:
    """True if a message ends with a question, or asks the user for an answer."""
    return _ASKS.search(message.strip()) is not None


def read_test_outcome(call: rollout_pb2.CallRecord) -> bool | None:
    """True if a call ran tests and its result shows that all passed; None if it ran none.

    A result is evidence only if nothing else in the command could have printed it.
    """
    outcome = read_program_outcome(call, TESTS)
    if not outcome:
        return outcome
    is_failed = TEST_FAILED.search(call.result) or _NOT_PASSED.search(call.result)
    return not is_failed and _TEST_PASSED.search(call.result) is not None


def read_program_outcome(call: rollout_pb2.CallRecord, beginnings: Beginnings) -> bool | None:
    """True if a call ran such a program and it ended well; None if it ran none."""
    if call.name != TERMINAL or call.is_malformed:
        return None
    commands = [_unwrapped(command) for command in split_commands(argument(call, "command"))]
    runs = [command for command in commands if _begins(command, beginnings)]
    if not runs:
        return None
    others = [command for command in commands if command and command not in runs]
    is_alone = all(command[0] in _HARMLESS for command in others)
    return is_alone and not call.is_error and not _ENDED_BADLY.search(call.result)


def split_commands(line: str) -> list[list[str]]:
    """The commands of a shell line as words, in order; empty if the line does not parse."""
    lines = [each for each in line.splitlines() if not each.lstrip().startswith("#")]
    lexer = shlex.shlex(";".join(lines), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    commands: list[list[str]] = [[]]
    try:
        for word in lexer:
            if word and set(word) <= set(";|&()"):
                commands.append([])
            else:
                commands[-1].append(word)
    except ValueError:
        return []
    return [command for command in commands if command]


def _unwrapped(command: list[str]) -> list[str]:
    """A command without variables, wrappers and a version of Python before it."""
    words = list(command)
    while words:
        wrapper = next((w for w in _WRAPPERS if tuple(words[: len(w)]) == w), None)
        if _ASSIGNMENT.match(words[0]):
            words = words[1:]
        elif words[0] == "timeout":
            words = words[2:]
        elif wrapper:
            words = words[len(wrapper) :]
        else:
            break
    if words and re.fullmatch(r"python3?(?:\.\d+)?", words[0]):
        words[0] = "python"
    return words


def _begins(command: list[str], beginnings: Beginnings) -> bool:
    return any(tuple(command[: len(each)]) == each for each in beginnings)


def _texts(call: rollout_pb2.CallRecord, name: str) -> list[str]:
    """Items of a list argument, which a policy writes as JSON or one per line."""
    try:
        arguments = json.loads(call.arguments_json or "{}")
        value = arguments.get(name, []) if isinstance(arguments, dict) else []
        if isinstance(value, str) and value.lstrip().startswith("["):
            value = json.loads(value)
    except (ValueError, RecursionError):
        return []
    items = value.splitlines() if isinstance(value, str) else value
    return [each for each in items if isinstance(each, str)] if isinstance(items, list) else []


def _normal_path(path: str) -> str:
    return posixpath.normpath(path.strip().removeprefix("/workspace/")) if path.strip() else ""
