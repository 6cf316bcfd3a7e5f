"""Real clusters of a test run's own, and the programs that talk to them."""

import atexit
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support import needs

DRIVER = Path(__file__).parents[3] / "hack" / "testbed" / "testbed.py"
UNAVAILABLE = 69
UP_LIMIT_S = 300
"""Five seconds on an idle machine; a busy one gets patience."""
LIMIT_S = 400
"""Of one call; longer than any time-out that a test gives to a program."""

State = Mapping[str, Any]
Program = Callable[..., str]


def driver(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """One command of the testbed: `driver("restart", "etcd", …)`."""
    words = (sys.executable, str(DRIVER), *arguments)
    return subprocess.run(words, check=False, capture_output=True, text=True, timeout=UP_LIMIT_S)


def cluster(level: str, *, audited: str = "") -> Iterator[State]:
    """A cluster from `up` to `down`; the level `apiserver` has no node, and takes half as long.

    Requests of the user `audited` are written to the file that the state calls audit_log.
    """
    started = driver("up", "--level", level, "--owner", str(os.getpid()), "--audit", audited)
    if started.returncode == UNAVAILABLE:
        needs.skip(started.stderr.strip(), "cluster")
    assert started.returncode == 0, started.stderr
    state: State = json.loads(started.stdout)

    def stop() -> None:
        driver("down", "--index", str(state["index"]))

    atexit.register(stop)  # also when a fixture fails while it is being set up
    yield state
    stop()
    atexit.unregister(stop)


def program(state: State, name: str) -> Program:
    """kubectl or helm as administrator; a failure is an AssertionError with what it said.

    With `fails=True` a failure is what is wanted, and its message is the answer. `text` is what the
    program reads from its input.
    """
    path = str(Path(state["binaries"]) / name)
    environment = {**os.environ, "KUBECONFIG": state["kubeconfig"]}

    def run(*arguments: str, text: str | None = None, fails: bool = False) -> str:
        done = subprocess.run(
            (path, *arguments),
            check=False,
            capture_output=True,
            text=True,
            input=text,
            env=environment,
            timeout=LIMIT_S,
        )
        assert (done.returncode != 0) == fails, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stderr if fails else done.stdout

    return run


def wait_until_listed(kubectl: Program, *kinds: str) -> None:
    """Until each of `kinds` is listed, which an API server may refuse at first.

    Raises:
        AssertionError: it goes on to refuse.
    """
    deadline = time.monotonic() + UP_LIMIT_S
    for kind in kinds:
        while True:
            try:
                kubectl("get", kind, "--all-namespaces")
                break
            except AssertionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
