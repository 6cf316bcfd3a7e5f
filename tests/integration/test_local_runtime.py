"""A run on this machine from its manifest to its end, with a small stand-in for the trainer."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from etude.common.run_folder.lock import is_running
from etude.common.run_folder.state import LocalState, read_state

LIMIT_S = 240.0
"""Far above what these runs take, on a machine that others load."""

STUB = Path(__file__).with_name("stub_trainer.py")

RUN = """
apiVersion: etude.dev/v1alpha1
kind: RLRun
metadata: {{name: demo}}
spec:
  model: {{uri: "s3://inputs/model"}}
  storage: {{uri: "s3://runs/demo"}}
  phases:
  - name: sft
    type: SupervisedFineTuning
    maxSteps: {steps}
    optimizer: {{learningRate: "1e-3"}}
    data: [{{name: traces, uri: "s3://inputs/traces.jsonl"}}]
  roles: {{trainer: {{env: [{{name: STUB_EXIT, value: "{stub_exit}"}}]}}}}
"""


class Local:
    """The runtime as a process, its roles replaced by what is first on PATH."""

    def __init__(self, root: Path, *, steps: int = 10, stub_exit: str = "") -> None:
        self.folder = root / "run"
        self.file = root / "rlrun.yaml"
        self.file.write_text(RUN.format(steps=steps, stub_exit=stub_exit))
        commands = root / "bin"
        commands.mkdir(exist_ok=True)
        trainer = commands / "etude-trainer"
        trainer.write_text(f"#!/bin/sh\nexec {sys.executable} {STUB}\n")
        trainer.chmod(0o755)
        self.commands = commands

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        script = f"""if True:
            from etude.operator.local import runtime as local
            env = local._base_env()
            local._base_env = lambda: env | {{'PATH': {str(self.commands)!r} + ':' + env['PATH']}}
            local.main()
        """
        command = [sys.executable, "-c", script, "--file", str(self.file), "--dir"]
        return subprocess.Popen([*command, str(self.folder), *arguments], stderr=subprocess.PIPE)

    def state(self) -> LocalState:
        found = read_state(self.folder)
        assert found is not None
        return found

    def steps(self) -> list[list[str]]:
        path = self.folder / "steps.txt"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def trainer_pid(self) -> int:
        """Once the state file shows it, which is up to half a second later."""
        found: list[int] = []

        def is_shown() -> bool:
            state = read_state(self.folder)
            found[:] = [
                p.pid for p in (state.pods if state else ()) if p.pid and p.role == "trainer"
            ]
            return bool(found)

        self.until(is_shown)
        return found[0]

    def until(self, condition: Any) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, self.folder
            time.sleep(0.05)


def conditions(state: LocalState) -> dict[str, str]:
    found = state.run["status"]
    assert isinstance(found, dict)
    return {c["type"]: c["status"] for c in found["conditions"]}  # type: ignore[index, union-attr, call-overload, misc] # JSON


def test_a_run_ends_complete_with_its_files_in_the_run_folder(tmp_path: Path) -> None:
    local = Local(tmp_path)
    process = local.start()
    assert process.wait(LIMIT_S) == 0
    state = local.state()
    assert conditions(state)["Complete"] == "True"
    assert (local.folder / "run.yaml").exists()
    assert (
        "=== demo-trainer-0 start 0"
        in (local.folder / "logs/attempt-0/demo-trainer-0.log").read_text()
    )
    objects = json.loads((local.folder / "objects.json").read_text())
    assert [m["status"]["phase"] for m in objects if m["kind"] == "Checkpoint"] == ["Ready"]
    assert local.start().wait(LIMIT_S) == 0
    assert len(local.steps()) == 10


def test_a_signal_saves_and_stops_and_the_same_command_resumes(tmp_path: Path) -> None:
    local = Local(tmp_path, steps=60)
    process = local.start()
    local.until(lambda: len(local.steps()) > 5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 130
    assert conditions(local.state())["Suspended"] == "True"
    assert not is_running(local.folder)
    again = local.start()
    assert again.wait(LIMIT_S) == 0
    steps = [int(step) for _, step in local.steps()]
    assert steps == list(range(1, 61))
    assert {epoch for epoch, _ in local.steps()} == {"1", "2"}


def test_a_killed_trainer_starts_anew_as_the_next_attempt(tmp_path: Path) -> None:
    local = Local(tmp_path, steps=200)
    process = local.start()
    local.until(lambda: len(local.steps()) > 2)
    pid = local.trainer_pid()
    os.kill(pid, signal.SIGKILL)
    # Where the operator is late, the kubelet has by then begun it once more in the old pod.
    local.until((local.folder / "logs/attempt-1/demo-trainer-0.log").exists)
    before = {epoch for epoch, _ in local.steps()}
    local.until(lambda: {epoch for epoch, _ in local.steps()} > before)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 130
    status = local.state().run["status"]
    assert isinstance(status, dict)
    assert status["attempt"] == 1
    assert status["lastFailure"]["exitCode"] == 137  # type: ignore[index, call-overload] # JSON
    assert (local.folder / "logs/attempt-1/demo-trainer-0.log").exists()


def test_a_killed_runtime_takes_its_processes_along_and_resumes(tmp_path: Path) -> None:
    local = Local(tmp_path, steps=40)
    process = local.start()
    local.until(lambda: len(local.steps()) > 2)
    pid = local.trainer_pid()
    process.kill()
    process.wait()
    local.until(lambda: not Path(f"/proc/{pid}").exists())
    assert local.start().wait(LIMIT_S) == 0
    assert conditions(local.state())["Complete"] == "True"


def test_two_signals_stop_at_once(tmp_path: Path) -> None:
    local = Local(tmp_path, steps=10_000)
    process = local.start()
    local.until(lambda: len(local.steps()) > 2)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 130
    local.until(lambda: not is_running(local.folder))


def test_a_role_that_refuses_its_configuration_fails_the_run_in_its_own_words(
    tmp_path: Path,
) -> None:
    process = Local(tmp_path, stub_exit="78").start()
    assert process.stderr is not None
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert b"demo-trainer-0 refused to start: storage.uri: nothing is there" in errors


def test_a_second_runtime_of_the_same_run_is_refused(tmp_path: Path) -> None:
    local = Local(tmp_path, steps=10_000)
    process = local.start()
    local.until(lambda: read_state(local.folder) is not None)
    other = local.start()
    _, errors = other.communicate(timeout=LIMIT_S)
    assert other.returncode == 8
    assert f"process {process.pid} already runs this run".encode() in errors
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    process.wait(LIMIT_S)


def test_a_bad_manifest_is_refused_with_every_finding(tmp_path: Path) -> None:
    local = Local(tmp_path)
    process = local.start(
        "--set", "spec.phases[sft].maxStep=3", "--set", "spec.storage.uri=nowhere"
    )
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 4
    assert b"maxStep" in errors
    assert b"storage.uri" in errors
    assert not local.folder.exists()


def test_a_manifest_that_is_suspended_says_how_to_go_on(tmp_path: Path) -> None:
    local = Local(tmp_path)
    local.file.write_text(local.file.read_text() + "  suspend: true\n")
    process = local.start()
    _, words = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert b"--set spec.suspend=false resumes" in words
    assert local.start("--set", "spec.suspend=false").wait(LIMIT_S) == 0
