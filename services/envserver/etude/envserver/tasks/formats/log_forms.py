"""Logs of test runners other than pytest: copied into tests/ with the grader of a task.

Each reader gives the status of each test by its name, in pytest's words. Standard library only.
"""

import collections
import json
import re
from collections.abc import Callable, Mapping

_GO = {"pass": "PASSED", "fail": "FAILED", "skip": "SKIPPED"}
_CARGO = {"ok": "PASSED", "FAILED": "FAILED", "ignored": "SKIPPED"}
_CARGO_PROGRAM = re.compile(r"\s*(?:Running (?:unittests )?|Doc-tests )(\S+)")
_CARGO_TEST = re.compile(r"test (.+?)(?: - should panic)? \.\.\. (ok|FAILED|ignored)\b")
_TAP_TEST = re.compile(
    r"\s*(not )?ok\b\s*\d*\s*-?\s*(.*?)(\s#\s*(?:skip|todo)\b.*)?$", re.IGNORECASE
)
_TAP_GROUP = re.compile(r"\s*# (?:Subtest: )?(.*)")


def read_go(log: str) -> dict[str, str]:
    """Statuses in the log of `go test -json`; a test's name is its package, `::` and its own."""
    found = {}
    for line in log.split("\n"):
        if not line.startswith("{"):
            continue
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and event.get("Test") and event.get("Action") in _GO:
            found[f"{event.get('Package')}::{event['Test']}"] = _GO[event["Action"]]
    return found


def read_cargo(log: str) -> dict[str, str]:
    """Statuses in the log of `cargo test`; a name begins with the source of its test program."""
    found, program = {}, ""
    for line in log.split("\n"):
        begun = _CARGO_PROGRAM.match(line)
        if begun:
            program = begun[1]
        match = _CARGO_TEST.match(line)
        if match:
            found[f"{program}::{match[1]}"] = _CARGO[match[2]]
    return found


def read_tap(log: str) -> dict[str, str]:
    """Statuses of the points of a log in TAP, each named by the comment before it and its text.

    Points of one name are numbered: the third is `name #3`.
    """
    found, group = {}, ""
    counts = collections.Counter[str]()
    for line in log.split("\n"):
        match = _TAP_TEST.match(line)
        if match is None:
            begun = _TAP_GROUP.match(line)
            group = begun[1].strip() if begun else group
            continue
        name = f"{group} > {match[2].strip()}"
        counts[name] += 1
        status = "FAILED" if match[1] else "PASSED"
        found[f"{name} #{counts[name]}"] = "SKIPPED" if match[3] else status
    return found


READERS: Mapping[str, Callable[[str], dict[str, str]]] = {
    "go": read_go,
    "cargo": read_cargo,
    "tap": read_tap,
}
