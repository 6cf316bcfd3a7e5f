"""The operator's process: how it ends."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from etude.operator.kube.interface import ClusterError
from etude.operator.main import main, serve_to_exit_code
from etude.operator.settings import PARTS

SETTINGS = {
    **{f"ETUDE_IMAGE_{part.upper()}": "etude:1" for part in PARTS},
    "ETUDE_POD": "operator-0",
    "ETUDE_NAMESPACE": "lab",
    "ETUDE_PROBE_PORT": "0",
    "ETUDE_TLS_MODE": "Plaintext",
}
TOLD_WHILE_IT_LOADS = """
import os, signal, sys
from etude.operator.main import main

class Loading:
    def find_spec(self, name, path, target=None):
        if name == "etude.operator.service":
            os.kill(os.getpid(), signal.SIGTERM)

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as the kernel does for the first process
sys.meta_path.insert(0, Loading())
main()
"""


async def failing(*errors: Exception) -> None:
    async def fail(error: Exception) -> None:
        raise error

    async with asyncio.TaskGroup() as outer, asyncio.TaskGroup() as inner:
        outer.create_task(fail(errors[0]))
        for error in errors[1:]:
            inner.create_task(fail(error))


def test_what_ends_a_task_is_said_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve_to_exit_code(failing(ClusterError("one"), ClusterError("two"))) == 1
    said = capsys.readouterr().err.splitlines()
    assert sorted(said) == ["etude-operator: one", "etude-operator: two"]


def test_a_bug_stays_loud() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        serve_to_exit_code(failing(ClusterError("one"), KeyError("two")))
    assert caught.group_contains(KeyError)
    assert not caught.group_contains(ClusterError)


def test_a_kubeconfig_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {**SETTINGS, "KUBECONFIG": str(tmp_path / "none")}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert str(tmp_path / "none") in said
    assert "Traceback" not in said


def test_an_operator_that_is_told_to_go_while_it_loads_goes(tmp_path: Path) -> None:
    settings = {**os.environ, **SETTINGS, "KUBECONFIG": str(tmp_path / "none")}
    command = [sys.executable, "-c", TOLD_WHILE_IT_LOADS]
    ended = subprocess.run(command, env=settings, capture_output=True, check=False, timeout=60)
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr.decode()
