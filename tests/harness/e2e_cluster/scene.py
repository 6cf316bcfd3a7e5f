"""What every stage of a pass works with: the bed, the run on it, and its store."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.harness.e2e_cluster.bed import Bed, RefusedError
from tests.harness.e2e_cluster.history import History
from tests.harness.e2e_cluster.transcript import Transcript

from etude.common.blobs import Store
from etude.common.blobs.factory import open_store
from etude.v1 import weights_pb2

HOME = "etude-system"
LAB = "lab"
RUN = "demo"
BUCKET = "etude"
PREFIX = "runs/demo"
ENDPOINT = f"http://etude-minio.{HOME}.svc:9000"
WAIT_S = 900.0
"""The longest wait on an idle machine is half a minute; a busy one gets patience."""

Object = dict[str, Any]


class Pod(NamedTuple):
    """One pod of the run or its pool."""

    name: str
    role: str
    uid: str
    ip: str
    is_ready: bool
    is_going: bool


class Scene:
    """The run as a user sees it."""

    def __init__(self, bed: Bed, transcript: Transcript, folder: Path) -> None:
        self.bed = bed
        self.transcript = transcript
        self.folder = folder
        self.histories: dict[str, History] = {}

    def watch(self) -> None:
        """Keep every change of the run, its checkpoints and pods, from now on."""
        for kind in ("rlr", "ckpt", "pods"):
            path = self.folder / f"{kind}.changes"
            self.histories[kind] = History(self.bed, path, LAB, kind)

    def end(self) -> None:
        """Stop watching."""
        for history in self.histories.values():
            history.end()

    def say(self, line: str) -> None:
        """One line of the transcript."""
        self.transcript.say(f"   {line}")

    def shell(self, words: str) -> None:
        """A command of a user, and what it answers, in the transcript."""
        self.transcript.show(words, self.bed.run("sh", "-c", words))

    def run(self) -> Object:
        """The run."""
        return self.bed.get("-n", LAB, "rlr", RUN)

    def pods(self) -> dict[str, Pod]:
        """Pods of the run and of its pool, by name; a Job's are not theirs."""
        found = self.bed.get("-n", LAB, "pods", "-l", "app.kubernetes.io/managed-by=etude")
        pods = [_pod(each) for each in found["items"]]
        return {each.name: each for each in pods if each.role != "janitor"}

    def checkpoints(self) -> list[Object]:
        """The run's, oldest first."""
        found: list[Object] = self.bed.get("-n", LAB, "ckpt")["items"]
        return sorted(found, key=lambda each: int(each["spec"]["step"]))

    def wait(self, what: str, holds: Callable[[], bool], limit_s: float = WAIT_S) -> None:
        """Until something holds; a run that failed ends the wait.

        Raises:
            AssertionError: it failed, or it never holds.
        """
        deadline_s = time.monotonic() + limit_s
        while not self._holds(holds):
            assert time.monotonic() < deadline_s, f"never: {what}"
            time.sleep(0.5)

    def _holds(self, holds: Callable[[], bool]) -> bool:
        try:
            return holds()
        except RefusedError:
            return False  # a pod that is being replaced is not found for a moment

    def wait_for_run(self, what: str, holds: Callable[[Object], bool]) -> Object:
        """The run once it is so."""
        found: Object = {}

        def seen() -> bool:
            found.update(self.run())
            state = found.get("status", {})
            if state.get("phase") == "Failed":
                raise AssertionError(f"the run failed: {json.dumps(state, indent=1)}")
            return holds(found)

        self.wait(what, seen)
        return found

    def wait_for_steps(self, more: int) -> Object:
        """The run once so many further steps are finished."""
        wanted = step_of(self.run()) + more
        return self.wait_for_run(f"step {wanted}", lambda run: step_of(run) >= wanted)

    def patch(self, spec: Object) -> None:
        """Change the run as `kubectl patch` does."""
        body = json.dumps({"spec": spec})
        self.bed.kubectl("-n", LAB, "patch", "rlr", RUN, "--type=merge", "-p", body)

    def keys(self) -> dict[str, str]:
        """The store's keys, from the Secret that the chart made."""
        words = "{{range $k, $v := .data}}{{$k}}={{base64decode $v}}\n{{end}}"
        told = self.bed.kubectl(
            "-n", HOME, "get", "secret", "etude-minio", "-o", f"go-template={words}"
        )
        return dict(line.split("=", 1) for line in told.split())

    def ca(self) -> Object:
        """The Secret of the CA that the run's certificates come from, keys and all."""
        data: Object = self.bed.get("-n", HOME, "secret", "etude-ca")["data"]
        return data

    def store(self, prefix: str) -> Store:
        """The bucket below a prefix, through the Service's address, which this machine reaches."""
        service = self.bed.get("-n", HOME, "service", "etude-minio")
        os.environ.update(self.keys())
        address = f"http://{service['spec']['clusterIP']}:9000"
        return open_store(f"s3://{BUCKET}/{prefix}", endpoint=address)

    def engine_status(self) -> weights_pb2.WeightStatus:
        """What the engine says that it serves: asked by the trainer, as it answers nobody else."""
        (trainer,) = (each.name for each in self.pods().values() if each.role == "trainer")
        script = Path(__file__).with_name("ask_engine.py").read_text(encoding="utf-8")
        words = ("-n", LAB, "exec", "-i", trainer, "--", "python", "-")
        told = self.bed.kubectl(*words, text=script)
        return weights_pb2.WeightStatus.FromString(bytes.fromhex(told.strip()))


def step_of(run: Object) -> int:
    """Finished steps of the active phase."""
    return int(run.get("status", {}).get("step", {}).get("current", 0))


def condition(body: Object, kind: str) -> Object:
    """One condition; empty if it was not said yet."""
    found = body.get("status", {}).get("conditions", [])
    return next((each for each in found if each["type"] == kind), {})


def _pod(body: Object) -> Pod:
    metadata, status = body["metadata"], body["status"]
    return Pod(
        name=metadata["name"],
        role=metadata["labels"].get("etude.dev/role", ""),
        uid=metadata["uid"],
        ip=status.get("podIP", ""),
        is_ready=condition(body, "Ready").get("status") == "True",
        is_going="deletionTimestamp" in metadata,
    )
