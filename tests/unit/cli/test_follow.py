"""Whoever watches a run in the foreground takes it along when told to end."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from etude.cli.output import Exit
from etude.cli.runs import STOP_SIGNALS, LocalRuntime, await_state, stop_runtime
from etude.cli.verbs.run import follow_run

RUNTIME = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("ready", flush=True)
signal.sigwait([signal.SIGTERM])
raise SystemExit(130)
"""


def started() -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", RUNTIME], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"ready\n"
    return process


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_to_the_watcher_asks_the_runtime_to_stop(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    runtime = started()
    timer = threading.Timer(0.3, os.kill, (os.getpid(), number))
    timer.start()
    watched = LocalRuntime(process=runtime, folder=tmp_path, log_start=0)
    assert follow_run(watched, as_lines=True, again="etude demo") == Exit.INTERRUPTED
    assert runtime.returncode == 130
    assert "run it again to resume: etude demo" in capsys.readouterr().err
    assert signal.getsignal(number) is before


def test_a_runtime_that_was_killed_is_told_by_its_signal_and_its_own_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "logs" / "runtime.log"
    log.parent.mkdir()
    log.write_text("words of another\n")
    start = log.stat().st_size
    with log.open("a") as file:
        file.write("words of its own\n")
    runtime = started()
    runtime.kill()
    found = follow_run(
        LocalRuntime(process=runtime, folder=tmp_path, log_start=start), as_lines=True
    )
    said = capsys.readouterr().err
    assert found == Exit.NO
    assert "words of its own" in said
    assert "words of another" not in said
    assert "ended by signal 9" in said
    assert f"etude logs {tmp_path}; to try again: etude run {tmp_path}/run.yaml" in said


def test_a_view_that_fails_takes_the_run_along(tmp_path: Path) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "resources.jsonl")

    runtime = started()
    with pytest.raises(OSError, match="No space left"):
        follow_run(
            LocalRuntime(process=runtime, folder=tmp_path, log_start=0), as_lines=True, on_look=full
        )
    assert runtime.returncode == 130


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_while_the_run_starts_takes_it_along(
    number: signal.Signals, tmp_path: Path
) -> None:
    before = signal.getsignal(number)
    runtime = started()
    timer = threading.Timer(0.3, os.kill, (os.getpid(), number))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        await_state(LocalRuntime(process=runtime, folder=tmp_path, log_start=0))
    assert runtime.wait(10) == 130
    assert signal.getsignal(number) is before


def test_a_stop_waits_for_a_runtime_that_has_not_said_its_process_yet(tmp_path: Path) -> None:
    runtime = started()
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def says() -> None:
            lock.write(str(runtime.pid))
            lock.flush()

        timer = threading.Timer(0.3, says)
        timer.start()
        stop_runtime(tmp_path, now=False)
        timer.join()
    assert runtime.wait(10) == 130
