"""A pool and a reward service as the processes that a run has, on this machine."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.support.free_ports import reserve_port

from etude.demo import task_folders
from etude.demo.problems import Problem, Source

READY_TIMEOUT_S = 60.0
"""A busy machine needs ten seconds for a Python process with gRPC."""

DEMO_FUNCTIONS = [
    {"name": "tests", "function": "Verifier", "parameters": {"onlyWhenFinished": True}},
    {
        "name": "length",
        "function": "LengthPenalty",
        "weight": "0.05",
        "parameters": {
            "q": 0,
            "power": 2,
            "weights": {"promptTokens": 1, "completionTokens": 1, "toolOutputTokens": 1},
            "free": 260,
            "scale": 220,
            "cap": 1,
            "onlyOnSuccess": True,
        },
    },
    {"name": "broken", "function": "BrokenCalls", "weight": "0.2"},
    {"name": "unfinished", "function": "Unfinished", "weight": "0.1"},
]


@dataclass
class Role:
    """One process with its ports; start() again after stop() or kill() is a restart."""

    arguments: tuple[str, ...]
    env: Mapping[str, str]
    folder: Path
    port: int = field(default_factory=reserve_port)
    probe_port: int = field(default_factory=reserve_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        ports = {"ETUDE_PORT": str(self.port), "ETUDE_PROBE_PORT": str(self.probe_port)}
        scratch = self.folder / "scratch"
        scratch.mkdir(parents=True, exist_ok=True)
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *self.arguments],
                env={**os.environ, "ETUDE_SCRATCH": str(scratch), **ports, **self.env},
                stdout=log,
                stderr=log,
            )
        self._await_ready()

    def _await_ready(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                log = (self.folder / "log").read_text()
                if self.process.returncode == 78 and "DriverUnavailable" in log:
                    pytest.skip(log)
                pytest.fail(f"{self.arguments} ended with {self.process.returncode}: {log}")
            with contextlib.suppress(OSError):
                url = f"http://127.0.0.1:{self.probe_port}/readyz"
                with urllib.request.urlopen(url, timeout=5) as answer:
                    if answer.status == 200:
                        return
            time.sleep(0.05)
        pytest.fail(f"{self.arguments} not ready: {(self.folder / 'log').read_text()}")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(timeout=READY_TIMEOUT_S)


@dataclass
class Stack:
    """Broker, node and rewards of one run, and two tasks."""

    broker: Role
    node: Role
    rewards: Role
    problems: list[Problem]
    tasks: list[Path]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    root = tmp_path_factory.mktemp("stack")
    problems = list(Source(31).take("train", 18))
    tasks = [root / "tasks" / f"train-{index}" for index in range(len(problems))]
    for problem, folder in zip(problems, tasks, strict=True):
        task_folders.write(problem, folder)
    made = _roles(root, problems, tasks)
    try:
        for role in (made.broker, made.node, made.rewards):
            role.start()
        yield made
    finally:
        for role in (made.rewards, made.node, made.broker):
            if role.process is not None and role.process.poll() is None:
                role.stop()


def _roles(root: Path, problems: list[Problem], tasks: list[Path]) -> Stack:
    pool = {
        "templates": [{"name": "python", "trust": "Trusted"}],
        "isolation": {"minimum": "Process"},
        "slotsPerReplica": 8,
        "lease": {"ttlSeconds": 60},
    }
    pool_file, run_file = root / "pool.json", root / "run.json"
    pool_file.write_text(json.dumps({"name": "demo-repos", "uid": "p", "spec": pool}))
    broker = Role(
        ("etude.envserver.main", "broker"), {"ETUDE_POOL_FILE": str(pool_file)}, root / "broker"
    )
    node = Role(
        ("etude.envserver.main", "node"),
        {"ETUDE_POOL_FILE": str(pool_file), "ETUDE_BROKER_TARGET": broker.target},
        root / "node",
    )
    run_file.write_text(json.dumps({"name": "demo", "uid": "r", "spec": _spec(root, pool)}))
    rewards = Role(
        ("etude.rewards.main",),
        {
            "ETUDE_RUN_FILE": str(run_file),
            "ETUDE_BROKERS": json.dumps({"repos": broker.target}),
            "ETUDE_TRACES_FILE": str(root / "traces.jsonl"),
        },
        root / "rewards",
    )
    return Stack(broker, node, rewards, problems, tasks)


def _spec(root: Path, pool: Mapping[str, object]) -> dict[str, object]:
    phase = {
        "name": "rl",
        "type": "ReinforcementLearning",
        "maxSteps": 1,
        "optimizer": {"learningRate": "1e-4"},
        "tasks": [{"name": "train", "uri": (root / "tasks").as_uri(), "environment": "repos"}],
        "algorithm": {},
    }
    return {
        "model": {"uri": root.as_uri()},
        "storage": {"uri": (root / "store").as_uri()},
        "phases": [phase],
        "roles": {
            "inference": {},
            "environments": [{"name": "repos", "template": "python", "poolTemplate": pool}],
            "rewards": {"functions": DEMO_FUNCTIONS},
        },
    }
