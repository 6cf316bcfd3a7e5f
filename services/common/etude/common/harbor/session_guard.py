"""Plugin of pytest that ends a session with success only if all of its tests were counted.

A copy of this file lies next to the hidden tests. The session runs in a child process; the process
that the verifier started waits for it and takes its exit code from the child's own account. A
session without an account, or one whose numbers do not add up, ends with 3:

    passed + failed + errored + skipped + verifier_errored = total

Covered: an early exit of the code under test, tests that it skips or marks, output after the
summary, processes that wait for the verifier, a reward file written before the tests ended,
functions of pytest and unittest, clocks and modules of the tests that were replaced. Not covered:
code that finds this module in memory and writes an account of its own, or undoes a replacement in
time.

Standard library and pytest only, for Python 3.6 and later.
"""

import contextlib
import json
import os
import secrets
import signal
import sys
import time
import types
import unittest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

BROKEN = 3
"""Exit code, that of an internal error of pytest."""
REWARDS = ("/logs/verifier/reward.txt", "/logs/verifier/reward.json")
_MAX_ACCOUNT_BYTES = 4096
_KILLS = 100
_PR_SET_CHILD_SUBREAPER = 36
_OUTPUT = "etude_session_checks"
_RUNNER = ("_pytest", "pluggy", "unittest")
_SKIPS = (unittest.SkipTest, pytest.skip.Exception, pytest.xfail.Exception)
_SKIP_NAMES = ("pytestmark", "pytest_generate_tests")
_TEST_FOLDERS = {"test", "tests", "testing", "__tests__"}
_CODE_FOLDERS = [Path("/workspace"), *(each for each in [Path.cwd()] if each.name)]
_FIXED = (
    (time, ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "process_time")),
    (unittest.TestCase, ("run", "assertEqual", "assertTrue", "assertRaises", "fail")),
    (os, ("_exit",)),
)
"""Functions that a verdict rests on; a test may replace them only while it runs."""
_CALLS = [(owner, name, getattr(owner, name)) for owner, names in _FIXED for name in names]


class Binding:
    """A name that a module or class binds to a function, a class or a module."""

    def __init__(self, space: "Mapping[str, Any]", where: str, name: str) -> None:
        self.label = f"{where}.{name}"
        self._space, self._name = space, name
        self._value = space[name]
        self._code = _code(self._value)

    def is_replaced(self) -> bool:
        """True if the name stands for something else by now."""
        value = self._space.get(self._name)
        return value is not self._value or _code(value) is not self._code


def _code(value: object) -> object:
    return getattr(getattr(value, "__func__", value), "__code__", None)


def _runner_bindings() -> "Iterator[Binding]":
    """Functions and classes of pytest and unittest, as far as they are loaded."""
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] not in _RUNNER:
            continue
        yield from _bindings(vars(module), module_name)
        for owner in list(vars(module).values()):
            if isinstance(owner, type) and owner.__module__ == module_name:
                yield from _bindings(vars(owner), f"{module_name}.{owner.__name__}")


def _bindings(space: "Mapping[str, Any]", where: str) -> "Iterator[Binding]":
    for name, value in list(space.items()):
        if callable(value) or isinstance(value, (classmethod, staticmethod, property)):
            yield Binding(space, where, name)


def _module_bindings(items: "Sequence[pytest.Item]") -> "Iterator[Binding]":
    """Modules, and functions of the clock, by their names in the tests' own modules."""
    clocks = [call for owner, _, call in _CALLS if owner is time]
    for module, _ in _test_modules(items):
        for name, value in list(vars(module).items()):
            if isinstance(value, types.ModuleType) or any(value is clock for clock in clocks):
                yield Binding(vars(module), module.__name__, name)


def _test_modules(items: "Sequence[pytest.Item]") -> "list[tuple[types.ModuleType, Path]]":
    """The tests' own modules, each with its file."""
    found = {}
    for item in items:
        module = getattr(item, "module", None)
        if module is not None:
            found[id(module)] = (module, Path(str(getattr(item, "path", None) or item.fspath)))
    return list(found.values())


def _planted_names(items: "Sequence[pytest.Item]") -> "Iterator[str]":
    """Names by which a module of tests skips them all, and that its source does not have."""
    for module, path in _test_modules(items):
        planted = [name for name in _SKIP_NAMES if name in vars(module)]
        source = path.read_text(errors="replace") if planted else ""
        for name in planted:
            if name not in source:
                yield f"{module.__name__}.{name}"


def pytest_cmdline_main(config: "pytest.Config") -> "int | None":
    """Run the session in a child, and answer with the exit code that its account allows."""
    if getattr(config.option, "help", False) or getattr(config.option, "version", False):
        return None
    if hasattr(config, "workerinput"):
        # A worker of pytest-xdist: its threads would not survive a fork, and another one counts.
        config.pluginmanager.register(SessionChecks(), "etude-session-checks")
        return None
    token = secrets.token_hex(16)
    reader, writer = os.pipe()
    _adopt_orphans()
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


class SessionChecks:
    """Checks in the process of the tests for what the code under test must not do."""

    def __init__(self) -> None:
        self.replaced = ""
        self.skipped_by = ""
        self._runner: list[Binding] = []
        self._modules: list[Binding] = []

    def pytest_sessionstart(self) -> None:
        self._runner = list(_runner_bindings())

    def pytest_collection_finish(self, session: "pytest.Session") -> None:
        self._modules = list(_module_bindings(session.items))
        self.replaced = self.replaced or next(_planted_names(session.items), "")

    def pytest_runtest_setup(self) -> None:
        self._check_calls()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, call: "pytest.CallInfo[None]") -> "Generator[None]":
        # Another hook turns unittest's exception into one that is raised elsewhere.
        raised = call.excinfo
        yield
        if raised is not None and _is_skip(raised.value) and not self.skipped_by:
            self.skipped_by = _tested_file(raised.tb)

    def pytest_sessionfinish(self, session: "pytest.Session") -> None:
        self._check_calls()
        self._check_bindings([*self._runner, *self._modules])
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[_OUTPUT] = [self.replaced, self.skipped_by]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """Take over what a worker of pytest-xdist found."""
        output = getattr(node, "workeroutput", None) or {}
        replaced, skipped_by = output.get(_OUTPUT, ["", ""])
        self.replaced = self.replaced or str(replaced)
        self.skipped_by = self.skipped_by or str(skipped_by)

    def _check_calls(self) -> None:
        for owner, name, call in _CALLS:
            if getattr(owner, name) is not call and not self.replaced:
                self.replaced = f"{owner.__name__}.{name}"

    def _check_bindings(self, bindings: "list[Binding]") -> None:
        for binding in bindings if not self.replaced else ():
            if binding.is_replaced():
                self.replaced = binding.label
                return


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
        self._exit = os._exit
        self._checks = SessionChecks()
        config.pluginmanager.register(self._checks, "etude-session-checks")
        config.add_cleanup(self._finish)

    def pytest_sessionstart(self, session: "pytest.Session") -> None:
        self._session = session

    def pytest_runtest_logreport(self, report: "pytest.TestReport") -> None:
        before = self._verdicts.get(report.nodeid, "")
        verdict = str(report.outcome)
        if verdict == "failed" and report.when != "call":
            verdict = "errored"
        if before in {"", "passed"} and (report.when == "call" or verdict != "passed"):
            self._verdicts[report.nodeid] = verdict

    def pytest_sessionfinish(self) -> None:
        for reward in self._rewards:
            reward.restore()

    def _finish(self) -> None:
        session = self._session
        found = list(self._verdicts.values())
        counts = {name: found.count(name) for name in ("passed", "failed", "errored", "skipped")}
        total = 0 if session is None else session.testscollected
        counts["verifier_errored"] = max(0, total - len(found))
        status = BROKEN if session is None else int(session.exitstatus)
        account = {"token": self._token, "status": status, "total": total, **counts}
        account["replaced"] = self._checks.replaced
        account["skipped_by"] = self._checks.skipped_by
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
    num_ended = _end_group(child)
    status, what = _judge(data, token)
    for reward in rewards if what or num_ended else ():
        reward.restore()
    # A verifier that reads the last line of the output must not read one of the code under test.
    for stream in (sys.stdout, sys.stderr) if what else (sys.stderr,):
        stream.write(f"etude: {what or _line(json.loads(data.decode()))}\n")
        stream.flush()
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
    problem = _problem(account)
    return (BROKEN, f"verifier error: {problem}") if problem else (status, "")


def _problem(account: "dict[str, Any]") -> str:
    """The reason for which a valid account does not count."""
    if account["skipped_by"]:
        return f"{account['skipped_by'][-100:]} skipped a test"
    if account["replaced"]:
        return f"{account['replaced'][:60]} was replaced"
    missing = account["verifier_errored"] or account["failed"] or account["errored"]
    if account["status"] == 0 and (missing or account["total"] == 0):
        return "the test session reports success without it"
    return ""


def _line(account: "dict[str, int]") -> str:
    names = ("passed", "failed", "errored", "skipped", "verifier_errored", "total")
    return " ".join(f"{name}={account[name]}" for name in names)


def _is_skip(error: BaseException) -> bool:
    """True for an exception, or a group with one, by which a test counts as skipped."""
    parts = getattr(error, "exceptions", ())
    return isinstance(error, _SKIPS) or any(_is_skip(part) for part in parts)


def _tested_file(traceback: "types.TracebackType | None") -> str:
    """File of the code under test that was called when an exception was raised; empty if none was.

    What that code compiles has any file name, so its own frames count wherever the last one lies.
    Frames around the test are of a plugin that is itself under test.
    """
    called, is_in_test = "", False
    while traceback is not None:
        frame, traceback = traceback.tb_frame, traceback.tb_next
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] in _RUNNER:
            continue
        path = Path(frame.f_code.co_filename)
        if _is_tested(path):
            called = called or str(path)
        elif not is_in_test and _is_test(path):
            called, is_in_test = "", True
    return called


def _is_tested(path: Path) -> bool:
    """True for a file of the code under test."""
    for root in _CODE_FOLDERS:
        if root in path.parents:
            inside = path.relative_to(root)
            return not (_is_test(inside) or "site-packages" in inside.parts)
    return False


def _is_test(path: Path) -> bool:
    is_named = path.name.startswith(("test_", "conftest")) or path.stem.endswith("_test")
    return is_named or bool(_TEST_FOLDERS.intersection(path.parts))


def _adopt_orphans() -> None:
    """Become the parent of processes that descendants leave behind."""
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes  # noqa: PLC0415 - not every interpreter has it

        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end_group(child: int) -> int:
    """End the descendants that a session left, this process's own by now; returns their number."""
    ended = 0
    for _ in range(_KILLS):
        left = [process for process, parent in _parents() if parent in {child, os.getpid()}]
        for process in left:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.waitpid(process, 0)
        ended += len(left)
        if not left:
            break
    return ended


def _parents() -> "list[tuple[int, int]]":
    """Process and parent of each process that can be seen and runs."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, parent, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            if state != "Z":
                found.append((int(folder.name), int(parent)))
    return found
