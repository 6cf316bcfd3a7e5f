"""Local runs: folder, runtime process, start and stop."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from etude.cli.output import Exit, say
from etude.common.errors import Problem, UserError
from etude.common.run_folder.lock import is_running, runtime_pid

if TYPE_CHECKING:
    from etude.common.run_folder.state import LocalState

ROOT = Path("runs")
NAME = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
"""Keeps a name inside the folder of all runs."""
MAX_WORDS = 64 * 1024
"""Limit on the bytes of a log that go to the terminal."""
START_TIMEOUT_S = 30.0
"""A runtime writes its state within a second; busy cores need some more."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, a supervisor's signal, a terminal that closes: the run stops with its watcher."""
LOCK_TIMEOUT_S = 5.0
"""A runtime writes its process id within milliseconds of taking the folder."""


def folder_of(run: str) -> Path:
    """The run folder behind a name or a path.

    Raises:
        UserError: there is no such run.
    """
    for folder in (Path(run), ROOT / run):
        if (folder / "run.yaml").is_file():
            return folder
    raise UserError(
        Problem(
            "NotFound",
            what="no run folder with a run.yaml in it",
            where=run,
            fix=f"give a folder, or the name of a run under {ROOT}/",
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRuntime:
    """The local runtime of one run, as a process that this one started."""

    process: subprocess.Popen[bytes]
    folder: Path
    log_start: int
    """Offset of its first line in the log that all runtimes of the run share."""

    def read_log(self) -> str:
        """Its log from its start on, indented."""
        with _log(self.folder).open("rb") as file:
            file.seek(self.log_start)
            text = file.read(MAX_WORDS).decode(errors="replace")
        return indent_lines(text.splitlines())

    def read_log_end(self, lines: int = 12) -> str:
        """The end of its log, indented."""
        path = _log(self.folder)
        if not path.is_file():
            return "    (no log)"
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self.log_start, end - MAX_WORDS))
            text = file.read().decode(errors="replace")
        return indent_lines(text.splitlines()[-lines:])


def start_runtime(manifest: Path, folder: Path, settings: Sequence[str] = ()) -> LocalRuntime:
    """Start the local runtime of a run in a session of its own.

    Ctrl-C in the terminal must reach this process alone, which then asks the runtime to stop.

    Raises:
        UserError: the manifest is missing, or the run is running already.
    """
    if not manifest.is_file():
        raise UserError(
            Problem("NotFound", what="no such file", where=str(manifest), fix="check the path")
        )
    if is_running(folder):
        raise UserError(
            Problem(
                "Conflict",
                what=f"this run is running already, in process {runtime_pid(folder)}",
                where=str(folder),
                fix=f"etude watch {folder}, or etude stop {folder}",
            )
        )
    _log(folder).parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "etude.operator.local"]
    command += ["--file", str(manifest.resolve()), "--dir", str(folder.resolve())]
    for setting in settings:
        command += ["--set", setting]
    with _log(folder).open("ab") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
        return LocalRuntime(process=process, folder=folder, log_start=log.tell())


def await_state(runtime: LocalRuntime) -> "LocalState | None":
    """Wait for the first state of a started runtime; None when the run was complete before.

    Raises:
        UserError: it did not start in time.
        SystemExit: it refused to start; its log is printed and its exit code kept.
    """
    try:
        with handle_stop_signals(_raise_interrupt):
            state = _wait_for_state(runtime)
    except BaseException:
        # A signal to stop before the first state: the run must not go on unwatched.
        runtime.process.terminate()
        raise
    if state is not None or runtime.process.poll() == Exit.DONE:
        return state
    if (code := runtime.process.poll()) is not None:
        say(runtime.read_log())
        raise SystemExit(exit_code(code))
    runtime.process.terminate()
    log = runtime.read_log()
    raise UserError(
        Problem(
            "Unreachable",
            what=f"the local runtime did not start in {START_TIMEOUT_S:.0f} s:\n{log}",
            where=str(runtime.folder),
            fix="correct what it says; etude doctor checks this machine",
        )
    )


@contextmanager
def handle_stop_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle the signals that stop this process, inside the block."""
    before = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _raise_interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _wait_for_state(runtime: LocalRuntime) -> "LocalState | None":
    """The runtime's first state; None when it ended before, or wrote none in time."""
    from etude.common.run_folder.state import read_state  # noqa: PLC0415 - keeps other verbs fast

    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        is_over = runtime.process.poll() is not None
        state = read_state(runtime.folder)
        if state is not None and state.pid == runtime.process.pid:
            return state
        if is_over:
            break
        time.sleep(0.1)
    return None


def exit_code(returned: int) -> int:
    """Our exit code for that of a runtime; one that a signal killed counts as NO."""
    return returned if returned >= 0 else Exit.NO


def name_of(manifest: Path, *, kind: str = "RLRun") -> str:
    """The name of the one RLRun, or EvalRun, in a file.

    Raises:
        UserError: there is none, with everything that lint finds.
    """
    from etude.common.api import yaml_documents  # noqa: PLC0415 - keeps other verbs fast
    from etude.common.api.lint.linter import lint_file  # noqa: PLC0415 - the same

    try:
        values = [
            document.value
            for document in yaml_documents.parse_documents(yaml_documents.read_bounded(manifest))
        ]
    except yaml_documents.InvalidYamlError:
        values = []
    named = [v for v in values if isinstance(v, dict) and v.get("kind") == kind]
    metadata = named[0].get("metadata") if named else None
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if isinstance(name, str) and re.fullmatch(NAME, name):
        return name
    findings = "".join(finding.text() + "\n" for finding in lint_file(manifest))
    raise UserError(
        Problem(
            "InvalidSpec",
            what=f"holds no {kind} with a usable metadata.name",
            where=f"{findings}{manifest}",
            fix=f"etude lint {manifest}",
        )
    )


def indent_lines(lines: Sequence[str]) -> str:
    """Indent the output of another process."""
    return "\n".join("    " + line for line in lines)


def stop_runtime(folder: Path, *, now: bool) -> None:
    """Signal the runtime to save a checkpoint and stop, or to stop immediately.

    Raises:
        UserError: the runtime has not written its process id.
    """
    # The second signal is the runtime's order to stop without waiting.
    for _ in range(2 if now else 1):
        if (pid := _wait_for_pid(folder)) is not None:
            with suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(pid, signal.SIGTERM)
            time.sleep(0.2)


def _wait_for_pid(folder: Path) -> int | None:
    """The runtime's process id; None once there is no runtime.

    Raises:
        UserError: it has not written its process id.
    """
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while time.monotonic() < deadline:
        if (pid := runtime_pid(folder)) is not None or not is_running(folder):
            return pid
        time.sleep(0.05)
    raise UserError(
        Problem(
            "Unreachable",
            what="a process holds the run folder and does not say which one it is",
            where=str(folder),
            fix="try again; fuser .lock in the folder finds the process",
        )
    )


def _log(folder: Path) -> Path:
    return folder / "logs" / "runtime.log"
