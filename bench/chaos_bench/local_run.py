"""One real run on this machine: the local runtime, its pods, and what these start."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from etude.common.api import yaml_documents
from etude.common.run_folder.state import LocalState, read_state
from etude.operator.local.run_folder import run_outcome

DEMO = Path(__file__).parents[2] / "examples" / "demo" / "rlrun.yaml"
WARM_UP_STEPS = 200
"""Enough for a policy that makes calls; it need not be good."""
TASKS = 600
MAX_STALENESS = 1
STEPS = 24
"""Of one run."""
GROUPS, SIBLINGS = 4, 4
POLL_S = 0.05
GONE_S = 30.0
"""Longest wait for processes that were killed."""


class RunProcess(NamedTuple):
    """A process of a run."""

    pid: int
    title: str


@dataclass(slots=True)
class LocalRun:
    """A run below a folder, of which the local runtime is one process."""

    folder: Path
    manifest: Path
    _runtime: "subprocess.Popen[bytes] | None" = field(default=None, init=False)

    def start(self) -> None:
        """Start the runtime, which takes up what is in the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "etude.operator.local"]
        paths = ["--file", str(self.manifest), "--dir", str(self.folder)]
        with (self.folder / "runtime.log").open("ab") as log:
            self._runtime = subprocess.Popen(
                [*command, *paths], stdout=log, stderr=log, start_new_session=True
            )

    @property
    def exit_code(self) -> int | None:
        """Exit code of the runtime; None while it runs."""
        assert self._runtime is not None  # noqa: S101 - it was started
        return self._runtime.poll()

    def kill_machine(self) -> None:
        """Kill the runtime with SIGKILL, and with it all that it started, as when a node dies.

        Raises:
            TimeoutError: a process is still there.
        """
        if self._runtime is not None:
            self._runtime.kill()
            self._runtime.wait()
        limit_s = time.monotonic() + GONE_S
        while processes := self.processes():
            for each in processes:
                _kill(each.pid)
            if time.monotonic() > limit_s:
                raise TimeoutError(f"processes stay: {processes}")
            time.sleep(POLL_S)

    def state(self) -> LocalState | None:
        """State as the runtime last wrote it."""
        return read_state(self.folder)

    @property
    def is_complete(self) -> bool:
        """True once the run has reached its end."""
        state = self.state()
        return state is not None and run_outcome(dict(state.run)) == "Complete"

    def pod(self, role: str) -> RunProcess | None:
        """Process of a pod of a role; None while none runs."""
        state = self.state()
        pods = [] if state is None else [p for p in state.pods if p.role == role and p.pid]
        alive = {each.pid: each for each in self.processes()}
        return next((alive[pod.pid] for pod in pods if pod.pid in alive), None)

    def sandbox_process(self) -> RunProcess | None:
        """A process that the host of the sandboxes started; None while no call runs."""
        host = self.pod("node")
        found = [] if host is None else _descendants(host.pid)
        return RunProcess(found[-1], "sandbox") if found else None

    def processes(self) -> list[RunProcess]:
        """All processes that this run started, by what their environment names."""
        mark = str(self.folder).encode()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                is_ours = mark + b"/" in (entry / "environ").read_bytes()
                title = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
            except OSError:
                continue
            if is_ours and title:
                found.append(RunProcess(int(entry.name), title.strip()))
        return found


def _descendants(pid: int) -> list[int]:
    """Processes that a process started, and those that these started."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(each) for each in task.read_text(encoding="utf-8").split()]
        except OSError:
            continue  # it has ended
        for child in children:
            found += [child, *_descendants(child)]
    return found


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def kill(process: RunProcess) -> None:
    """Kill one process with SIGKILL."""
    _kill(process.pid)


def prepare(folder: Path) -> Path:
    """Make tasks and a policy that calls tools, once; return the manifest of runs with them.

    Raises:
        RuntimeError: the warm-up did not reach its end.
    """
    manifest = folder / "run.yaml"
    if manifest.exists():
        return manifest
    inputs = folder / "inputs"
    sizes = ["--rl", str(TASKS), "--held-out", "16", "--traces", "400"]
    generate = [sys.executable, "-m", "etude.demo.generate", "--out", str(inputs), "--seed", "0"]
    subprocess.run([*generate, *sizes], check=True)
    warm = LocalRun(folder / "warm", folder / "warm.yaml")
    _write(warm.manifest, _warm_up(inputs))
    warm.start()
    while warm.exit_code is None:
        time.sleep(POLL_S)
    if warm.exit_code:
        raise RuntimeError(f"the warm-up ended with {warm.exit_code}: {warm.folder}/runtime.log")
    model = max((warm.folder / "checkpoints").glob("*/model"))
    _write(manifest, _reinforcement(inputs, model))
    return manifest


def _write(path: Path, run: dict[str, Any]) -> None:
    path.write_text(yaml_documents.dump_documents([run]), encoding="utf-8")


def _demo(inputs: Path) -> dict[str, Any]:
    """The demo's manifest with these inputs."""
    text = json.dumps(yaml_documents.parse_documents(DEMO.read_bytes())[0].value)
    run: dict[str, Any] = json.loads(text.replace("s3://etude/demo/", f"{inputs.as_uri()}/"))
    run["metadata"]["name"] = "chaos"
    run["spec"]["storage"] = {"uri": "s3://etude/chaos"}
    run["spec"]["evaluation"] = []
    return run


def _warm_up(inputs: Path) -> dict[str, Any]:
    run = _demo(inputs)
    spec = run["spec"]
    spec["phases"] = [phase for phase in spec["phases"] if phase["name"] == "sft"]
    spec["phases"][0]["maxSteps"] = WARM_UP_STEPS
    spec["roles"] = {"trainer": spec["roles"]["trainer"]}
    return run


def _reinforcement(inputs: Path, model: Path) -> dict[str, Any]:
    """A short run of the real stack: each step has a checkpoint, and rollouts overlap steps."""
    run = _demo(inputs)
    spec = run["spec"]
    spec["model"] = {"uri": model.as_uri(), "seed": 0}
    spec["phases"] = [phase for phase in spec["phases"] if phase["name"] == "rl"]
    phase = spec["phases"][0]
    phase |= {"maxSteps": STEPS}
    phase["algorithm"] |= {"promptsPerStep": GROUPS, "groupSize": SIBLINGS}
    phase["asyncLimits"] = {"mode": "FullyAsync", "maxStalenessVersions": MAX_STALENESS}
    phase["rollout"] |= {"maxConcurrent": 16, "maxInfraFailurePercent": 100}
    spec["roles"]["trainer"] |= {"threadsPerRank": 1, "rolloutWorkers": 2}
    spec["roles"]["inference"] |= {"maxConcurrent": 16, "kvCacheMib": 64}
    spec["checkpointing"] = {"everySteps": 1, "keepLast": 3}
    spec["failurePolicy"] = {"maxRestarts": 1000}
    return run
