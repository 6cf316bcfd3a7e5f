"""`etude run`, `watch`, `stop`: a run on this machine from start to end."""

import io
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from etude.cli import runs
from etude.cli.live_view import draw_view, show_run
from etude.cli.output import Exit, SafeConsole, console, say
from etude.cli.verbs.options import RunFolder
from etude.cli.verbs.report import write_report
from etude.common.errors import Problem, UserError
from etude.common.run_folder.lock import is_running

if TYPE_CHECKING:
    from etude.cli.folder_view import FolderViewer

SAVED_WIDTH = 96
LOOK_INTERVAL_S = 10.0
"""Measuring the memory of the demo's twenty processes costs 0.1 CPU-seconds: the kernel walks their
page tables."""


def run(
    file: Annotated[Path, typer.Argument(help="Manifest of one RLRun.")],
    *,
    folder: Annotated[Path | None, typer.Option("--dir", help="Run folder; runs/NAME.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Change a field: spec.path=value.")
    ] = None,
    detach: Annotated[bool, typer.Option(help="Return once the run has started.")] = False,
    plain_log: Annotated[
        bool, typer.Option("--plain", help="Lines instead of a draw_view.")
    ] = False,
) -> None:
    """Run a manifest on this machine; run it again to resume. Ctrl-C saves and stops."""
    if not file.is_file():
        raise UserError(
            Problem("NotFound", what="no such file", where=str(file), fix="check the path")
        )
    target = folder or runs.ROOT / runs.name_of(file)
    runtime = runs.start_runtime(file, target, settings or [])
    state = runs.await_state(runtime)
    if state is None:
        _draw_once(target)
        say(f"complete already; etude report {target} shows what it learned")
        return
    if detach:
        say(f"started in process {state.pid}; etude watch {target}; etude stop {target}")
        return
    code = follow_run(runtime, as_lines=plain_log)
    if code == Exit.DONE:
        say(f"report: {write_report(target)}")
    raise SystemExit(code)


def watch(
    name: RunFolder,
    *,
    plain_log: Annotated[
        bool, typer.Option("--plain", help="Lines instead of a draw_view.")
    ] = False,
    save: Annotated[Path | None, typer.Option(help="Write the draw_view to an SVG file.")] = None,
) -> None:
    """Watch a run of this machine; Ctrl-C ends the watching, not the run."""
    folder = runs.folder_of(name)
    if save is not None:
        _save(folder, save)
        return
    if not is_running(folder):
        _draw_once(folder)
        return
    _show(folder, as_lines=plain_log, is_over=lambda: not is_running(folder))


def stop(
    name: RunFolder,
    *,
    now: Annotated[bool, typer.Option(help="Do not save a checkpoint first.")] = False,
) -> None:
    """Save a checkpoint and stop a run of this machine; run it again to resume."""
    folder = runs.folder_of(name)
    if not is_running(folder):
        say(f"{folder} is not running")
        return
    runs.stop_runtime(folder, now=now)
    say("stopping" if now else "saving a checkpoint, then stopping")
    while is_running(folder):
        time.sleep(0.2)
    _draw_once(folder)


def follow_run(
    runtime: runs.LocalRuntime,
    *,
    as_lines: bool,
    on_look: Callable[[], None] | None = None,
    again: str = "",
) -> int:
    """Show a run until it ends; the first Ctrl-C asks it to save and stop, the second to stop.

    Args:
        runtime: the run's local runtime.
        as_lines: a plain log even on a terminal.
        on_look: called every few seconds, for measurements of the run.
        again: what resumes the run, if it is not `etude run`.

    Returns:
        The exit code for the verb.
    """
    process, folder = runtime.process, runtime.folder
    again = again or f"etude run {folder}/run.yaml --dir {folder}"
    interrupts = 0

    def interrupted(_number: int, _frame: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += 1
        process.send_signal(signal.SIGTERM)
        with suppress(OSError):  # the terminal that closed is where this would go
            say("\nsaving a checkpoint, then stopping; Ctrl-C again stops immediately")

    with runs.handle_stop_signals(interrupted):
        try:
            _show(folder, as_lines=as_lines, is_over=_RuntimePoll(process, on_look).is_over)
            code = process.wait()
        except BaseException:
            # A full disk, a terminal that is gone: the run must not go on without its watcher.
            if not interrupts:
                process.send_signal(signal.SIGTERM)
            process.wait()
            raise
    if interrupts:
        say(f"stopped; run it again to resume: {again}")
        return Exit.INTERRUPTED
    if code:
        say(runtime.read_log_end())
        say(f"what each process said: etude logs {folder}; to try again: {again}")
    if code < 0:
        say(f"the local runtime was ended by signal {-code}")
    return runs.exit_code(code)


@dataclass(slots=True)
class _RuntimePoll:
    """Polls the end of the runtime, and calls a measurement now and then."""

    process: subprocess.Popen[bytes]
    on_look: Callable[[], None] | None
    _next_look: float = 0.0

    def is_over(self) -> bool:
        if self.on_look is not None and time.monotonic() >= self._next_look:
            self.on_look()
            self._next_look = time.monotonic() + LOOK_INTERVAL_S
        return self.process.poll() is not None


def _show(folder: Path, *, as_lines: bool, is_over: Callable[[], bool]) -> None:
    show_run(_viewer(folder), as_lines=as_lines, is_over=is_over)


def _viewer(folder: Path) -> "FolderViewer":
    from etude.cli.folder_view import FolderViewer  # the models of the API: for what is seen only

    return FolderViewer(folder)


def _save(folder: Path, target: Path) -> None:
    screen = SafeConsole(width=SAVED_WIDTH, record=True, file=io.StringIO())
    screen.print(draw_view(_viewer(folder).view()))
    svg = screen.export_svg(title="etude watch")
    # rich names a font on a content network; a picture should load nothing.
    target.write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL), encoding="utf-8")
    say(f"wrote {target}")


def _draw_once(folder: Path) -> None:
    console().print(draw_view(_viewer(folder).view()))
