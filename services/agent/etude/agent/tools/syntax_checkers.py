"""Syntax checkers of other languages than Python; shows only errors that edits brought in.

They run in the sandbox, like any command of the policy, on the file before and after its edits.
"""

import base64
import re
import shlex
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple, TypeVar

from etude.agent.tools.base import ToolError
from etude.agent.workspace import Workspace, relative_path

_MAX_BYTES = 64 << 10
"""Limit of a file: its original is part of the command, which has a limit too."""
_TIMEOUT_S = 30.0
_MISSING = 99
_BORDER = "\x01"
_NUMBER = re.compile(r"\d+")
_T = TypeVar("_T")


class _Checker(NamedTuple):
    """A program that reads a file on its standard input and complains line by line."""

    program: str
    command: str


_CHECKERS = {
    ".bash": _Checker("bash", "bash -n"),
    ".cjs": _Checker("node", "node --check -"),
    ".go": _Checker("gofmt", "gofmt -e >/dev/null"),
    ".js": _Checker("node", "node --check -"),
    ".json": _Checker("python3", "python3 -I -m json.tool >/dev/null"),
    ".php": _Checker("php", "php -l >/dev/null"),
    ".rb": _Checker("ruby", "ruby -c >/dev/null"),
    ".sh": _Checker("sh", "sh -n"),
}
SUFFIXES = tuple(_CHECKERS)


async def new_complaints(
    workspace: Workspace, path: str, before: bytes, present: bytes
) -> list[str]:
    """New complaints of the language's checker; none if the sandbox has no checker.

    Raises:
        ToolError: the file is too large, or the checker does not finish with it.
        WorkspaceLostError: the platform failed.
    """
    if before == present:
        return []
    if max(len(before), len(present)) > _MAX_BYTES:
        raise ToolError(f"no lints: {path} is larger than {_MAX_BYTES >> 10} KiB")
    done = await workspace.exec(_script(relative_path(path), before), timeout_s=_TIMEOUT_S)
    if done.timed_out or done.ended_for:
        raise ToolError(f"no lints: the checker took too long on {path}")
    if done.exit_code == _MISSING:
        return []
    old, _, new = done.output.decode("utf-8", "replace").partition(_BORDER)
    rows = new_items(new.splitlines(), old.splitlines(), lambda row: _NUMBER.sub("", row))
    return [f"{path}: {row}" for row in rows if row.strip()]


def new_items(
    present: Iterable[_T], before: Iterable[_T], identity: Callable[[_T], Hashable]
) -> list[_T]:
    """Items that were not there before, by identity and number."""
    known = Counter(map(identity, before))
    fresh: list[_T] = []
    for item in present:
        if known[identity(item)] > 0:
            known[identity(item)] -= 1
        else:
            fresh.append(item)
    return fresh


def _script(path: str, before: bytes) -> str:
    checker = _CHECKERS["." + path.rpartition(".")[2]]
    return "\n".join(
        [
            f"command -v {checker.program} >/dev/null 2>&1 || exit {_MISSING}",
            f"check() {{ {checker.command}; }}",
            f"printf %s {base64.b64encode(before).decode()} | base64 -d | check 2>&1",
            f"printf '{_BORDER}'",
            f"check < {shlex.quote('./' + path)} 2>&1",
            "exit 0",
        ]
    )
