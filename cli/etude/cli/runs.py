"""Runs of this machine: where they live, how they start and end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from etude.common.errors import Problem, UserError
from etude.common.local import LocalState, is_running, read_state

ROOT = Path("runs")
START_TIMEOUT_S = 30.0
"""A runtime writes its state within a second; a busy machine needs some more."""


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


def start(manifest: Path, folder: Path, settings: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Start the local runtime of a run in a session of its own.

    Ctrl-C in the terminal must reach this process alone, which then asks the runtime to stop.

    Raises:
        UserError: the manifest is missing, or the run is running already.
    """
    if not manifest.is_file():
        raise UserError(
            Problem("NotFound", what="no such file", where=str(manifest), fix="check the path")
        )
    state = read_state(folder)
    if state is not None and is_running(state):
        raise UserError(
            Problem(
                "Usage",
                what=f"this run is running already, in process {state.pid}",
                where=str(folder),
                fix=f"etude watch {folder}, or etude stop {folder}",
            )
        )
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "etude.operator.local"]
    command += ["--file", str(manifest.resolve()), "--dir", str(folder.resolve())]
    for setting in settings:
        command += ["--set", setting]
    with (logs / "runtime.log").open("ab") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )


def await_state(process: subprocess.Popen[bytes], folder: Path) -> LocalState:
    """The first state that the started runtime writes.

    Raises:
        UserError: it ended first; its last words are in the message.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        state = read_state(folder)
        if state is not None and state.pid == process.pid:
            return state
        if process.poll() is not None:
            break
        time.sleep(0.1)
    raise UserError(
        Problem(
            "Unreachable",
            what="the local runtime did not start:\n" + last_words(folder / "logs" / "runtime.log"),
            where=str(folder),
            fix="correct what it says; etude doctor checks this machine",
        )
    )


def last_words(log: Path, lines: int = 12) -> str:
    """The end of a log file, indented."""
    if not log.is_file():
        return "    (no log)"
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 16_384))
        text = file.read().decode(errors="replace")
    return "\n".join("    " + line for line in text.splitlines()[-lines:])


def ask_to_stop(state: LocalState, *, now: bool) -> None:
    """Tell the runtime to save a checkpoint and end, or to end at once."""
    if is_running(state):
        os.kill(state.pid, signal.SIGTERM)
        if now:
            # The second signal is the runtime's order to stop without waiting.
            time.sleep(0.2)
            os.kill(state.pid, signal.SIGTERM)
