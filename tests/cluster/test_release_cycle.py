"""A candidate's way to all users as objects: evaluated, proposed, tried and promoted, or refused.

Real: the API server with its controllers of Jobs, Deployments and StatefulSets, the operator as a
process under the chart's account (killed once), the feedback service as a process with the rules
that the operator rendered, mutual TLS between both, kubectl's plug-in, users' events over HTTP, and
all decisions.
Played: the kubelet (there is no node, so pods are marked as ready or ended), with it engines,
gateways and the figures that the Jobs of evaluations hand over; and the recorded turns of users.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.harness.mutations import process
from tests.support import pki
from tests.support.feedback.experiment_users import send_work
from tests.support.feedback.process import FeedbackProcess
from tests.support.kube import testbeds

from etude.common.blobs import open_store
from etude.common.experiments.assignment import Arm
from etude.common.tls.identity import Identity

ROOT = Path(__file__).parents[2]
OUT = ROOT / "bench" / "out"
LIMIT_S = 180
NAMESPACE = "lab"
ROUTE = "coder"
GRPC_PORT = 7091
"""Of feedback services in pods."""
SUITE = {"name": "held-out", "uri": "s3://nowhere/held-out", "environment": "repos"}
METRIC = {"relevant": "0.2"}


def manifest(kind: str, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    head = {"apiVersion": "etude.dev/v1alpha1", "kind": kind, "metadata": {"name": name}}
    return {**head, "spec": spec}


POOL = manifest("EnvPool", "shared", {"templates": [{"name": "python"}], "replicas": 0})
RUN = manifest(
    "RLRun",
    "demo",
    {
        "suspend": True,
        "model": {"uri": "s3://nowhere/model"},
        "storage": {"uri": "s3://nowhere/run"},
        "phases": [
            {
                "name": "sft",
                "type": "SupervisedFineTuning",
                "maxSteps": 10,
                "optimizer": {"learningRate": "3e-3"},
                "data": [{"name": "traces", "uri": "s3://nowhere/traces.jsonl"}],
            }
        ],
        "roles": {
            "trainer": {},
            "inference": {},
            "environments": [
                {"name": "repos", "poolRef": {"name": "shared"}, "template": "python"}
            ],
            "rewards": {"functions": [{"name": "tests", "function": "Verifier"}]},
        },
    },
)
SERVED = manifest(
    "PolicyRoute",
    ROUTE,
    {
        "runRef": {"name": "demo"},
        "channels": {"stable": {}, "canary": {}},
        "gateway": {"keysRef": {"name": "gateway-keys"}, "replicas": 1},
        "feedback": {
            "keysRef": {"name": "feedback-keys"},
            "secretRef": {"name": "ledger"},
            "keyStoreUri": "s3://keys-of-users/coder",
        },
        "gate": {
            "evaluation": {
                "suites": [SUITE],
                "environments": [
                    {"name": "repos", "poolRef": {"name": "shared"}, "template": "python"}
                ],
                "samples": 4,
            }
        },
        "canary": {
            "steps": [2500, 5000],
            "stepSeconds": 0,
            "usersPerArm": 30,
            "minUsers": 8,
            "primary": {"name": "edit persistence", "signal": "edit_persistence", **METRIC},
            "guardrails": [
                {
                    "name": "complaints",
                    "signal": "dissatisfied_followup",
                    "isHigherBetter": False,
                    **METRIC,
                }
            ],
            "signals": [],
        },
    },
)


@dataclass
class Bed:
    """A control plane with an operator, and what plays its node."""

    state: testbeds.State
    kubectl: testbeds.Program
    folder: Path
    operators: contextlib.ExitStack
    operator: process.Running | None = None

    def start_operator(self) -> None:
        """Start an operator; one that runs is killed before."""
        if self.operator is not None:
            self.operator.stop(signal.SIGKILL)
        certificate = str(self.folder / "operator")
        started = process.running(self.state, self.folder, ETUDE_TLS=certificate)
        self.operator = self.operators.enter_context(started)

    def get(self, *what: str) -> Any:
        return json.loads(self.kubectl("-n", NAMESPACE, "get", *what, "-o", "json"))

    def apply(self, *objects: Mapping[str, Any]) -> None:
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        self.kubectl("-n", NAMESPACE, "apply", "-f", "-", text=text)

    def set_status(self, pod: Mapping[str, Any], status: Mapping[str, Any]) -> None:
        words = ("patch", "pod", pod["metadata"]["name"], "--subresource=status", "--type=merge")
        try:
            self.kubectl("-n", NAMESPACE, *words, "-p", json.dumps({"status": status}))
        except AssertionError as error:  # its owner was deleted meanwhile
            if "NotFound" not in str(error):
                raise

    def play_node(self) -> None:
        """Mark new pods as ready, and those of Jobs about checkpoints as done."""
        for pod in self.get("pods")["items"]:
            role = pod["metadata"]["labels"].get("etude.dev/role")
            if pod["status"].get("phase") != "Pending" or role == "evaluator":
                continue
            if role == "janitor":
                self.end(pod, "")
            else:
                ready = [{"type": "Ready", "status": "True"}]
                found = {"podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}]}
                self.set_status(pod, {"phase": "Running", "conditions": ready, **found})

    def end(self, pod: Mapping[str, Any], message: str) -> None:
        """The containers of a pod end in success; the first one with a message."""
        statuses = [
            {
                "name": each["name"],
                "image": each["image"],
                "imageID": "",
                "ready": False,
                "restartCount": 0,
                "state": {"terminated": {"exitCode": 0, "message": message}},
            }
            for each in pod["spec"]["containers"]
        ]
        self.set_status(pod, {"phase": "Succeeded", "containerStatuses": statuses})

    def wait(self, what: str, found: Callable[[], Any]) -> Any:
        """Play the node until something is found."""
        deadline_s = time.monotonic() + LIMIT_S
        while not (value := found()):
            assert time.monotonic() < deadline_s, f"never happened: {what}\n{self.show()}"
            self.play_node()
            time.sleep(0.5)
        return value

    def save(self, number: int) -> str:
        """Register a checkpoint with this policy version, as the operator does for a run."""
        name = f"demo-s{10 * number:08d}-{number:06x}"
        uid = self.get("rlrun", "demo")["metadata"]["uid"]
        spec = {
            "runRef": {"name": "demo", "uid": uid},
            "reason": "Window",
            "source": {"uri": f"s3://nowhere/run/{number}", "manifestDigest": f"{number:064x}"},
            "storage": {"uri": "s3://nowhere/run"},
            "step": 10 * number,
            "policyVersion": number,
        }
        self.apply(manifest("Checkpoint", name, spec))
        self.wait(f"{name} Ready", lambda: phase(self.get("checkpoint", name)) == "Ready")
        return name

    def finish_evaluation(self, checkpoint: str, result: Mapping[str, Any]) -> None:
        """Wait for the Job of a checkpoint's evaluation, and hand a result over."""

        def find_pod() -> Any:
            names = [
                each["metadata"]["name"]
                for each in self.get("evalrun")["items"]
                if each["spec"]["checkpointRef"]["name"] == checkpoint
            ]
            return next(
                (
                    pod
                    for pod in self.get("pods", "-l", "etude.dev/role=evaluator")["items"]
                    if pod["metadata"]["labels"]["etude.dev/evaluation"] in names
                    and pod["status"]["phase"] == "Pending"
                ),
                None,
            )

        self.end(self.wait(f"evaluation of {checkpoint}", find_pod), json.dumps(result))

    def proposed(self) -> tuple[str, str]:
        """Reason and message of the condition about the candidate."""
        for each in self.get("policyroute", ROUTE).get("status", {}).get("conditions", ()):
            if each["type"] == "CandidateProposed":
                return each["reason"], each["message"]
        return "", ""

    def ask(self, *words: str) -> str:
        """Run a verb of the plug-in."""
        binaries = self.state["binaries"]
        environment = {**os.environ, "KUBECONFIG": self.state["kubeconfig"]}
        environment["PATH"] = f"{binaries}:{environment['PATH']}"
        command = [str(ROOT / ".venv" / "bin" / "kubectl-etude"), "-n", NAMESPACE, *words]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, env=environment, timeout=LIMIT_S
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    def show(self) -> str:
        """What people type to see what is tried."""
        tables = self.kubectl("-n", NAMESPACE, "get", "policyroute,evalrun", "-o", "wide")
        status = self.get("policyroute", ROUTE).get("status", {})
        newest = (status.get("candidate") or {}).get("evaluation") or ""
        words = [("describe", "policyroute", ROUTE)]
        words += [("describe", "evalrun", newest)] if newest else []
        return "\n".join([tables, *(self.kubectl("-n", NAMESPACE, *each) for each in words)])


def phase(found: Mapping[str, Any]) -> str:
    return str(found.get("status", {}).get("phase", ""))


def figures(number: int, low: str = "", verdict: str = "", *, baseline: int = 0) -> dict[str, Any]:
    """Result of an evaluation."""
    suite = {"name": "held-out", "tasks": 120, "samples": 480, "lost": 0, "mean": "0.6100"}
    result = {"policy": f"1.{number}", "manifestDigest": f"{number:064x}", "suites": [suite]}
    if not baseline:
        return result
    difference = f"{float(low) + 0.015:.3f}"
    found = {"metric": "Success", "difference": difference, "low": low, "high": "0.05"}
    counts = dict.fromkeys(("expected", "scored", "baselineExpected", "baselineScored"), 480)
    suite |= {"verdict": verdict, "comparisons": [found | counts | {"tasks": 120, "unpaired": 0}]}
    return result | {"verdict": verdict, "baselinePolicy": f"1.{baseline}"}


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    authority = pki.Authority()
    for role, identity in {
        "operator": Identity(domain="etude.dev", namespace=process.HOME, role="operator"),
        "feedback": Identity(domain="etude.dev", namespace=NAMESPACE, route=ROUTE, role="feedback"),
    }.items():
        pki.write(tmp_path / role, authority.issue(identity))
    for state in testbeds.cluster("apiserver"):
        process.install(state)
        kubectl = testbeds.program(state, "kubectl")
        kubectl("create", "namespace", NAMESPACE)
        with contextlib.ExitStack() as operators:
            made = Bed(state, kubectl, tmp_path, operators)
            made.start_operator()
            yield made
            assert made.operator is not None
            assert made.operator.troubles == []


def prepare_service(bed: Bed) -> FeedbackProcess:
    """The service of the route, with the rules that the operator rendered for it."""
    service = FeedbackProcess.prepare(bed.folder)
    rules = json.loads(bed.get("configmap", f"{ROUTE}-feedback")["data"]["release.json"])
    # A look each second, instead of each minute.
    (bed.folder / "release.json").write_text(json.dumps(rules | {"intervalSeconds": 1}))
    service.settings = {
        "ETUDE_FEEDBACK_RELEASE": str(bed.folder / "release.json"),
        "ETUDE_FEEDBACK_RELEASE_PORT": str(GRPC_PORT),
        "ETUDE_FEEDBACK_HORIZON_S": "1",
        "ETUDE_TLS": str(bed.folder / "feedback"),
    }
    return service


@pytest.mark.timeout(900)
async def test_a_candidate_is_evaluated_proposed_tried_and_promoted_and_a_worse_one_is_not(
    bed: Bed,
) -> None:
    bed.apply(POOL, RUN)
    first = bed.save(1)
    bed.apply(SERVED)
    bed.wait("a feedback pod", lambda: phase(bed.get("policyroute", ROUTE)) == "Ready")
    service = prepare_service(bed)
    await service.start()
    try:
        asked = ("promote", ROUTE, "--version", "1.1", "--without-gate", "--reason", "first")
        assert "1.1 promoted" in await asyncio.to_thread(bed.ask, *asked)
        bed.wait("nothing new", lambda: bed.proposed()[0] == "NoNewCheckpoint")
        second = bed.save(2)
        bed.finish_evaluation(first, figures(1))
        assert bed.proposed()[0] == "Evaluating"
        bed.start_operator()
        bed.finish_evaluation(second, figures(2, "0.004", "Passed", baseline=1))
        bed.wait("a canary", lambda: "tested with users" in bed.proposed()[1])
        during = bed.show()
        await prefer_candidate(bed, service)
        bed.wait("1.2 for everyone", lambda: stable(bed) == ("1.2", second))
        refuse_third(bed)
        assert stable(bed) == ("1.2", second)
        keep(f"{during}\n{'=' * 80}\n{bed.show()}")
    finally:
        await service.stop(signal.SIGTERM)


async def prefer_candidate(bed: Bed, service: FeedbackProcess) -> None:
    """Users keep the edits of the candidate alone, and complain about neither."""
    store = open_store((bed.folder / "ledger").as_uri())
    await send_work(service, store, lambda arm: arm is Arm.TREATMENT, lambda _: False)


def refuse_third(bed: Bed) -> None:
    """A checkpoint that is worse is stopped by the gate, with 1.2's evaluation as the baseline."""
    checkpoint = bed.save(3)
    bed.finish_evaluation(checkpoint, figures(3, "-0.06", "Refused", baseline=2))
    bed.wait("a refusal", lambda: bed.proposed()[0] == "GateRefused")
    assert "success of held-out worse by 4.5 points" in bed.proposed()[1]
    assert len(bed.get("evalrun")["items"]) == 3, "one of each version, also after the kill"
    bed.wait("an Event", lambda: events(bed) >= {"Evaluating", "Proposed", "GateRefused"})


def events(bed: Bed) -> set[str]:
    """Reasons of the Events about the route."""
    found = bed.get("events", "--field-selector", f"involvedObject.name={ROUTE}")["items"]
    return {each["reason"] for each in found}


def stable(bed: Bed) -> tuple[str, str]:
    found = bed.get("policyroute", ROUTE)["status"]["stable"]
    return found.get("version", ""), found.get("checkpoint", "")


def keep(text: str) -> None:
    """Leave the transcript where benches leave figures, and print it for `pytest -s`."""
    OUT.mkdir(parents=True, exist_ok=True)
    text = f"{__doc__}\n{text}"
    (OUT / "release-cycle.txt").write_text(text, encoding="utf-8")
    sys.stdout.write(text)
