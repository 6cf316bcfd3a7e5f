"""Plugin of pytest that ends a session with success only if all of its tests were counted.

A copy of this file lies next to the hidden tests. The session runs in a child process; the process
that the verifier started waits for it and takes its exit code from the child's own account. A
session without an account, or one whose numbers do not add up, ends with 3:

    passed + failed + errored + skipped + verifier_errored = total

Covered: an early exit of the code under test, output after the summary, processes that wait for the
verifier, a reward file written before the tests ended, clocks and assertions that were replaced.
Not covered: code that finds this module in memory and writes an account of its own.

Standard library and pytest only, for Python 3.6 and later.
"""

import contextlib
import json
import os
import secrets
import signal
import sys
import time
import unittest
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

BROKEN = 3
"""Exit code, that of an internal error of pytest."""
REWARDS = ("/logs/verifier/reward.txt", "/logs/verifier/reward.json")
_MAX_ACCOUNT_BYTES = 4096
_KILLS = 100
_FIXED = (
    (time, ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "process_time")),
    (unittest.TestCase, ("run", "assertEqual", "assertTrue", "assertRaises", "fail")),
    (os, ("_exit",)),
)
"""Functions that a verdict rests on; a test may replace them only while it runs."""
_CALLS = [(owner, name, getattr(owner, name)) for owner, names in _FIXED for name in names]


def pytest_cmdline_main(config: "pytest.Config") -> "int | None":
    """Run the session in a child, and answer with the exit code that its account allows."""
    if getattr(config.option, "help", False) or getattr(config.option, "version", False):
        return None
    token = secrets.token_hex(16)
    reader, writer = os.pipe()
    rewards = [RewardFile(Path(path)) for path in REWARDS]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    child = os.fork()
    if child:
        os.close(writer)
        return _wait(child, reader, token, rewards)
    os.close(reader)
    account = SessionAccount(config, token, writer, rewards)
    config.pluginmanager.register(account, "etude-session-account")
    return None


class RewardFile:
    """State of a reward file before the tests: only the verifier writes it, after them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._content = None, b""
        with contextlib.suppress(OSError):
            self._inode = path.lstat().st_ino
            self._content = path.read_bytes()

    def restore(self) -> None:
        """Undo what the tests did to it, also in a folder that was made read-only."""
        path = self._path
        with contextlib.suppress(OSError):
            path.parent.chmod(0o755)
        with contextlib.suppress(OSError):
            if path.lstat().st_ino == self._inode and not path.is_symlink():
                # A shell that redirects into it holds it open.
                path.chmod(0o644)
                path.write_bytes(self._content)
            else:
                path.unlink()


class SessionAccount:
    """Counts the tests of a session, and writes its account as the last act of the child."""

    def __init__(
        self, config: "pytest.Config", token: str, writer: int, rewards: "list[RewardFile]"
    ) -> None:
        self._token = token
        self._rewards = rewards
        self._writer = writer
        self._session: pytest.Session | None = None
        self._verdicts: dict[str, str] = {}
        self._replaced = ""
        self._exit = os._exit
        config.add_cleanup(self._finish)

    def pytest_sessionstart(self, session: "pytest.Session") -> None:
        self._session = session

    def pytest_runtest_setup(self) -> None:
        self._check_calls()

    def pytest_runtest_logreport(self, report: "pytest.TestReport") -> None:
        before = self._verdicts.get(report.nodeid, "")
        verdict = str(report.outcome)
        if verdict == "failed" and report.when != "call":
            verdict = "errored"
        if before in {"", "passed"} and (report.when == "call" or verdict != "passed"):
            self._verdicts[report.nodeid] = verdict

    def pytest_sessionfinish(self) -> None:
        self._check_calls()
        for reward in self._rewards:
            reward.restore()

    def _check_calls(self) -> None:
        for owner, name, call in _CALLS:
            if getattr(owner, name) is not call and not self._replaced:
                self._replaced = f"{owner.__name__}.{name}"

    def _finish(self) -> None:
        session = self._session
        found = list(self._verdicts.values())
        counts = {name: found.count(name) for name in ("passed", "failed", "errored", "skipped")}
        total = 0 if session is None else session.testscollected
        counts["verifier_errored"] = max(0, total - len(found))
        status = BROKEN if session is None else int(session.exitstatus)
        account = {"token": self._token, "status": status, "total": total, **counts}
        account["replaced"] = self._replaced
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os.write(self._writer, json.dumps(account).encode())
        self._exit(status)


def _wait(child: int, reader: int, token: str, rewards: "list[RewardFile]") -> int:
    """Exit code of a session, after the end of all that it started."""
    os.waitpid(child, 0)
    os.set_blocking(reader, False)
    data = b""
    with contextlib.suppress(BlockingIOError):
        data = os.read(reader, _MAX_ACCOUNT_BYTES)
    os.close(reader)
    _end_group(child)
    status, what = _judge(data, token)
    for reward in rewards if what else ():
        reward.restore()
    sys.stderr.write(f"etude: {what or _line(json.loads(data.decode()))}\n")
    sys.stderr.flush()
    return status


def _judge(data: bytes, token: str) -> "tuple[int, str]":
    """Exit code that an account allows, and the reason if it is another one than its own."""
    try:
        account = json.loads(data.decode())
        parts = [account[name] for name in ("passed", "failed", "errored", "skipped")]
        missing, status, total = (account[n] for n in ("verifier_errored", "status", "total"))
        numbers = [*parts, missing, status, total]
        is_valid = account["token"] == token and all(type(number) is int for number in numbers)
    except (ValueError, KeyError, TypeError):
        return BROKEN, "verifier error: the test session ended without an account of its tests"
    if not is_valid or min(numbers) < 0 or sum(parts) + missing != total:
        return BROKEN, "verifier error: the account of the test session does not add up"
    if account["replaced"]:
        return BROKEN, f"verifier error: {account['replaced'][:60]} was replaced"
    if status == 0 and (missing or account["failed"] or account["errored"]):
        return BROKEN, "verifier error: the test session reports success without it"
    return status, ""


def _line(account: "dict[str, int]") -> str:
    names = ("passed", "failed", "errored", "skipped", "verifier_errored", "total")
    return " ".join(f"{name}={account[name]}" for name in names)


def _end_group(child: int) -> None:
    """End the descendants that a session left: they are this process's own now, or its group's."""
    for _ in range(_KILLS):
        left = [process for process, parent in _parents() if parent in {child, os.getpid()}]
        for process in left:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.waitpid(process, 0)
        if not left:
            return


def _parents() -> "list[tuple[int, int]]":
    """Process and parent of each process that can be seen."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            found.append((int(folder.name), int(fields[1])))
    return found
