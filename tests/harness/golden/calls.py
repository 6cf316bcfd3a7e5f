"""One call of the golden run, and what it needs."""

import json
from enum import StrEnum
from typing import NamedTuple


class Need(StrEnum):
    """What a call needs beside files; a driver without it leaves the call out, and says so."""

    SHELL = "commands"
    JOBS = "background commands"
    WALL = "a file system of its own, with the workspace at /workspace"
    GNU = "the programs of a Debian, whose complaints read as they do"


ALL = frozenset(Need)
_OF_TOOLS = {"run_terminal": {Need.SHELL}, "terminal_io": {Need.SHELL, Need.JOBS}}


class Step(NamedTuple):
    """One call."""

    name: str
    arguments_json: str
    needs: frozenset[Need]


Turn = tuple[Step, ...]
"""Calls that are asked at once."""


def step(name: str, /, *needs: Need, **arguments: object) -> Step:
    """A call; keywords that are no names in Python come in a dict called more."""
    more = arguments.pop("more", {})
    given = {**arguments, **(more if isinstance(more, dict) else {})}
    found = {*needs, *_OF_TOOLS.get(name, set())}
    if given.get("is_background"):
        found.add(Need.JOBS)
    return Step(name, json.dumps(given, ensure_ascii=False), frozenset(found))


def raw(name: str, arguments_json: str) -> Step:
    """A call with whatever text for its arguments."""
    return Step(name, arguments_json, frozenset())
