"""What a run folder says about its runtime."""

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from etude.common.errors import UserError
from etude.common.run_folder.lock import is_running, runtime_pid
from etude.common.run_folder.state import LocalState, write_state
from etude.operator.local import run_folder


def test_a_folder_without_a_runtime_is_not_running(tmp_path: Path) -> None:
    assert not is_running(tmp_path)
    assert runtime_pid(tmp_path) is None


def test_a_process_id_that_is_in_use_again_is_not_the_runtime(tmp_path: Path) -> None:
    write_state(tmp_path, LocalState(pid=os.getpid(), updated_unix_ms=1, run={}))
    (tmp_path / ".lock").write_text(str(os.getpid()))
    assert not is_running(tmp_path)
    assert runtime_pid(tmp_path) is None


def test_whoever_holds_the_lock_is_the_runtime(tmp_path: Path) -> None:
    with run_folder.lock_folder(tmp_path):
        assert is_running(tmp_path)
        assert runtime_pid(tmp_path) == os.getpid()
    assert not is_running(tmp_path)
    assert (tmp_path / ".lock").read_text() == ""


def test_the_process_id_of_a_runtime_that_died_is_not_that_of_the_next(tmp_path: Path) -> None:
    died = subprocess.Popen([sys.executable, "-c", ""])
    died.wait()
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(str(died.pid))
        lock.flush()
        assert is_running(tmp_path)
        assert runtime_pid(tmp_path) is None


def test_a_second_runtime_is_refused_with_the_process_of_the_first(tmp_path: Path) -> None:
    with (
        run_folder.lock_folder(tmp_path),
        pytest.raises(UserError, match=f"process {os.getpid()} already runs this run"),
        run_folder.lock_folder(tmp_path),
    ):
        pass


def test_somebody_who_only_looks_does_not_keep_a_runtime_from_starting(tmp_path: Path) -> None:
    lock = (tmp_path / ".lock").open("a+")
    fcntl.flock(lock, fcntl.LOCK_SH)
    looking = threading.Timer(0.05, lock.close)
    looking.start()
    with run_folder.lock_folder(tmp_path):
        assert runtime_pid(tmp_path) == os.getpid()
    looking.join()
