"""Whoever watches a run in the foreground takes it along when told to end."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from etude.cli.output import Exit
from etude.cli.verbs.run import STOP_SIGNALS, follow

RUNTIME = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("ready", flush=True)
signal.sigwait([signal.SIGTERM])
raise SystemExit(130)
"""


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_to_the_watcher_asks_the_runtime_to_stop(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    runtime = subprocess.Popen([sys.executable, "-c", RUNTIME], stdout=subprocess.PIPE)
    assert runtime.stdout is not None
    with runtime.stdout:
        assert runtime.stdout.readline() == b"ready\n"
    timer = threading.Timer(0.3, os.kill, (os.getpid(), number))
    timer.start()
    assert follow(runtime, tmp_path, as_lines=True) == Exit.INTERRUPTED
    assert runtime.returncode == 130
    assert "run it again to resume" in capsys.readouterr().err
    assert signal.getsignal(number) is before
