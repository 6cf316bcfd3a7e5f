"""A life of every kind of object with a controller that answers, on a cluster without a node.

What a node would do is done to the status of pods: they get an address, become ready, or end.
"""

import json
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
from tests.harness.mutations import schema
from tests.harness.mutations.api import Api
from tests.harness.mutations.state import conditions
from tests.support.kube.api_client import MERGE
from typing_extensions import override

from etude.common.api.schema import crd
from etude.operator.builders.addresses import PORTS
from etude.operator.kube.rest import path_of
from etude.v1 import run_pb2, run_pb2_grpc

LIMIT_S = 180.0
Manifest = dict[str, Any]


class Controller(run_pb2_grpc.RunServiceServicer):
    """What a run's trainer says to the operator, in a test's words."""

    def __init__(self, address: str, epoch: int) -> None:
        self._epoch = epoch
        self._said: list[run_pb2.WatchRunResponse] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        run_pb2_grpc.add_RunServiceServicer_to_server(self, self._server)
        assert self._server.add_insecure_port(f"{address}:{PORTS['trainer']['grpc']}")
        self._server.start()

    def say(self, run: Manifest, **what: Any) -> None:
        """Report something; whoever asks later hears it too."""
        self._said.append(
            run_pb2.WatchRunResponse(
                run_uid=run["metadata"]["uid"],
                epoch=self._epoch,
                sequence=len(self._said) + 1,
                **what,
            )
        )

    def stop(self) -> None:
        """Answer no more."""
        self._server.stop(None).wait()

    @override
    def WatchRun(self, request: Any, context: Any) -> Iterator[Any]:
        heard = 0
        while context.is_active():
            for response in self._said[heard:]:
                heard += 1
                if response.sequence > request.after_sequence:
                    yield response
            time.sleep(0.05)

    @override
    def Command(self, request: Any, context: Any) -> Any:
        return run_pb2.CommandResponse()


class Life:
    """The objects of one namespace, from their making to their end."""

    def __init__(self, api: Api, namespace: str, address: str) -> None:
        self.api, self.namespace, self.address = api, namespace, address

    def run(self) -> None:
        """A run is made, works, saves, is suspended, cut down, resumed, and is over."""
        body = schema.base(crd.RLRUN)
        spec = body["spec"]
        spec["checkpointing"] = {"keepLast": 1, "onSuspend": "Skip"}
        spec["deletionRules"] = []
        spec["ttlSecondsAfterFinished"] = 1
        self._make("RLRun", body)
        controller = Controller(self.address, epoch=1)
        try:
            self._trained(controller)
            self._patch("RLRun", {"suspend": True})
            self.until(lambda: self._has("RLRun", "Suspended"), "the suspension")
            controller.stop()
            self._cut_down()
            controller = Controller(self.address, epoch=2)
            self._start_trainer()
            done = run_pb2.RunStatus(state=run_pb2.RUN_STATE_DONE, step=20, observed_generation=99)
            controller.say(self._get("RLRun"), status=done)
            self.until(lambda: not self.api.get("RLRun", self.namespace, "base"), "the run goes")
        finally:
            controller.stop()

    def _trained(self, controller: Controller) -> None:
        self._start_trainer()
        state = run_pb2.RUN_STATE_RUNNING
        status = run_pb2.RunStatus(state=state, phase="sft", step=1, observed_generation=99)
        controller.say(self._get("RLRun"), status=status)
        for step in (10, 20):
            record = run_pb2.CheckpointRecord(
                step=step,
                reason="Scheduled",
                uri=f"s3://bucket/run/{step:012d}",
                manifest_digest=f"{step:064x}",
            )
            controller.say(self._get("RLRun"), checkpoint=record)
        self.until(lambda: self._finish_jobs() and self._steps() == [20], "retention")

    def _cut_down(self) -> None:
        live = self._get("RLRun")["spec"]
        smaller = {
            "phases": live["phases"][:1],
            "evaluation": None,
            "network": {"policy": "Unmanaged"},
            "roles": {"inference": None, "environments": None, "rewards": None},
        }
        self._patch("RLRun", smaller)
        self.until(lambda: not list(self.api.listed("EnvPool", self.namespace)), "the pool goes")
        self.until(
            lambda: not list(self.api.listed("PodDisruptionBudget", self.namespace)), "its budget"
        )
        self._patch("RLRun", {"suspend": False})

    def pool(self) -> None:
        """A pool is made, loses a node to a failure, its edge and its policies, and goes."""
        self._make("EnvPool", schema.base(crd.ENV_POOL))
        self.until(lambda: len(self._nodes()) == 2, "two nodes")
        before = {each["metadata"]["uid"] for each in self._nodes()}
        self._status(self._nodes()[0]["metadata"]["name"], {"phase": "Failed"})
        self.until(
            lambda: len({each["metadata"]["uid"] for each in self._nodes()} & before) == 1,
            "the node that failed goes",
        )
        self._patch("EnvPool", {"edge": None, "network": {"policy": "Unmanaged"}})
        self.until(lambda: not list(self.api.listed("NetworkPolicy", self.namespace)), "policies")
        self.api.call("DELETE", path_of("EnvPool", self.namespace, "base"))

    def route(self) -> None:
        """A route of a run that nobody trains is made, gets more gateways, loses its canary."""
        run = schema.base(crd.RLRUN)
        run["spec"]["managedBy"] = "example.com/nobody"
        self._make("RLRun", run)
        body = schema.base(crd.POLICY_ROUTE)
        self._make("PolicyRoute", body)
        self.until(lambda: self._has("PolicyRoute", "Accepted"), "the route is accepted")
        self.until(lambda: len(list(self.api.listed("Deployment", self.namespace))) == 2, "parts")
        replicas = body["spec"]["gateway"]["replicas"] + 1
        channels = {"canary": None}
        self._patch("PolicyRoute", {"gateway": {"replicas": replicas}, "channels": channels})
        self.until(
            lambda: len(list(self.api.listed("StatefulSet", self.namespace))) == 1,
            "the canary goes",
        )

    def evaluation(self) -> None:
        """An evaluation waits for a checkpoint that does not exist."""
        self._make("EvalRun", schema.base(crd.EVAL_RUN))
        self.until(lambda: "Accepted" in conditions(self._get("EvalRun")), "the evaluation is seen")

    def checkpoint(self) -> None:
        """A checkpoint is made by somebody, verified, pinned, and deleted with its data."""
        body = schema.base(crd.CHECKPOINT)
        body["spec"]["deletionPolicy"] = "Delete"
        self._make("Checkpoint", body)
        self.until(lambda: self._finish_jobs() and self._has("Checkpoint", "Ready"), "verified")
        self._patch("Checkpoint", {"pinned": True})
        self.api.call("DELETE", path_of("Checkpoint", self.namespace, "base"))
        self.until(
            lambda: self._finish_jobs() and not self.api.get("Checkpoint", self.namespace, "base"),
            "the checkpoint goes",
        )

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait for something that the operator or a controller does."""
        deadline_s = time.monotonic() + LIMIT_S
        while not holds():
            assert time.monotonic() < deadline_s, f"never happened: {what}: {self._statuses()}"
            time.sleep(0.2)

    def _statuses(self) -> str:
        found = {kind.name: self._get(kind.name).get("status") for kind in crd.KINDS}
        return json.dumps(found)

    def _make(self, kind: str, body: Manifest) -> None:
        reply = self.api.call("POST", path_of(kind, self.namespace), json.dumps(body))
        assert reply.is_good, reply.message

    def _get(self, kind: str) -> Manifest:
        return self.api.get(kind, self.namespace, "base")

    def _has(self, kind: str, condition: str) -> bool:
        return conditions(self._get(kind)).get(condition, ("", ""))[0] == "True"

    def _patch(self, kind: str, spec: Manifest) -> None:
        path, text = path_of(kind, self.namespace, "base"), json.dumps({"spec": spec})
        reply = self.api.call("PATCH", path, text, content=MERGE)
        assert reply.is_good, reply.message

    def _nodes(self) -> list[Manifest]:
        return [
            pod
            for pod in self.api.listed("Pod", self.namespace)
            if (pod["metadata"].get("labels") or {}).get("etude.dev/role") == "node"
            and not pod["metadata"].get("deletionTimestamp")
        ]

    def _steps(self) -> list[int]:
        return sorted(
            each["spec"]["step"] for each in self.api.listed("Checkpoint", self.namespace)
        )

    def _start_trainer(self) -> None:
        """Its pod gets the address of our controller, and is ready."""
        self.until(lambda: bool(self.api.get("Pod", self.namespace, "base-trainer-0")), "a trainer")
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        where = {"podIP": self.address, "podIPs": [{"ip": self.address}]}
        self._status("base-trainer-0", {"phase": "Running", "conditions": [ready], **where})

    def _finish_jobs(self) -> bool:
        """Every pod of a Job ends well; always true."""
        for pod in self.api.listed("Pod", self.namespace):
            is_job = (pod["metadata"].get("labels") or {}).get("etude.dev/role") == "janitor"
            if is_job and pod["status"]["phase"] == "Pending":
                self._status(pod["metadata"]["name"], {"phase": "Succeeded"})
        return True

    def _status(self, pod: str, status: Manifest) -> None:
        path = path_of("Pod", self.namespace, pod, "status")
        reply = self.api.call("PATCH", path, json.dumps({"status": status}), content=MERGE)
        assert reply.is_good or reply.status == 404, reply.message
