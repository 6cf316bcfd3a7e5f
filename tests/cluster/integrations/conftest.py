"""A control plane with the chart's integrations on, and an operator that stand-ins surround."""

import json
import os
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.kube import testbeds
from tests.support.kube.testbeds import Program

ROOT = Path(__file__).parents[3]
CRDS = ROOT / "tests" / "data" / "crds"
HOME = "etude-system"
LIMIT_S = 120
"""Patience for a busy machine; nothing here takes more than seconds on an idle one."""


@pytest.fixture(scope="session")
def plane() -> Iterator[Mapping[str, Any]]:
    """A control plane of these tests' own: others must not find our CRDs in theirs."""
    yield from testbeds.cluster("apiserver")


@pytest.fixture(scope="session")
def kubectl(plane: Mapping[str, Any]) -> Program:
    return testbeds.program(plane, "kubectl")


@pytest.fixture(scope="session")
def operator(
    plane: Mapping[str, Any], kubectl: Program, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """An operator under the account of a chart with every integration; the answer is its log."""
    helm = testbeds.program(plane, "helm")
    names = json.loads(values(helm))["integrations"]
    sets = [w for name in names for w in ("--set", f"integrations.{name}.enabled=true")]
    # An operator that is a process here has no sidecar, and so no certificate.
    given = ("image=localhost/etude:1", "isolation.allowProcess=true", "tls.mode=Plaintext")
    words = [word for each in given for word in ("--set", each)]
    chart = str(ROOT / "helm" / "etude")
    helm("install", "etude", chart, "--namespace", HOME, "--create-namespace", *words, *sets)
    kubectl("-n", HOME, "scale", "deployment/etude-operator", "--replicas=0")
    kubectl(
        *("wait", "--for=condition=Established", "--timeout=60s", "-f"),
        str(ROOT / "helm" / "etude" / "files" / "crds"),
    )
    folder = tmp_path_factory.mktemp("operator")
    log = folder / "operator.log"
    process = started(plane, kubectl, folder, log)
    yield log
    process.kill()
    process.wait(timeout=30)


def values(helm: Program) -> str:
    """The chart's own values as JSON."""
    return json.dumps(yaml.safe_load(helm("show", "values", str(ROOT / "helm" / "etude"))))


def started(
    plane: Mapping[str, Any], kubectl: Program, folder: Path, log: Path
) -> "subprocess.Popen[bytes]":
    deployment = json.loads(kubectl("-n", HOME, "get", "deployment/etude-operator", "-o", "json"))
    spec = deployment["spec"]["template"]["spec"]
    given = {e["name"]: e.get("value", "") for e in spec["containers"][0]["env"]}
    token = kubectl("-n", HOME, "create", "token", spec["serviceAccountName"], "--duration=1h")
    admin = json.loads(Path(plane["kubeconfig"]).read_text(encoding="utf-8"))
    user = [{"name": "operator", "user": {"token": token.strip()}}]
    context = [{"name": "testbed", "context": {"cluster": "testbed", "user": "operator"}}]
    config = folder / "kubeconfig"
    config.write_text(json.dumps({**admin, "users": user, "contexts": context}))
    own = {"ETUDE_POD": "operator", "ETUDE_NAMESPACE": HOME, "ETUDE_HOST": "127.0.0.1"}
    own |= {"ETUDE_PROBE_PORT": "0", "KUBECONFIG": str(config)}
    with log.open("ab") as out:
        return subprocess.Popen(
            [str(ROOT / ".venv" / "bin" / "etude-operator")],
            env={**os.environ, **given, **own},
            stdout=out,
            stderr=out,
        )


@pytest.fixture(scope="session")
def installed(kubectl: Program) -> Callable[[str], None]:
    """Install the CRDs of an integration, as an administrator does."""

    def install(name: str) -> None:
        kubectl("apply", "-f", str(CRDS / name))
        kubectl("wait", "--for=condition=Established", "--timeout=60s", "-f", str(CRDS / name))

    return install


@pytest.fixture
def namespace(kubectl: Program) -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex[:8]}"
    kubectl("create", "namespace", name)
    yield name
    kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(autouse=True)
def no_right_is_missing(operator: Path) -> Iterator[None]:
    """The operator was refused nothing, and stumbled over no bug of ours."""
    yield
    text = operator.read_text(encoding="utf-8", errors="replace")
    assert "is forbidden: User" not in text, text
    assert "Traceback" not in text, text


@pytest.fixture
def lab(kubectl: Program, namespace: str) -> "Lab":
    return Lab(kubectl, namespace)


class Lab:
    """Runs of one namespace, and what became of them."""

    def __init__(self, kubectl: Program, namespace: str) -> None:
        self.kubectl, self.namespace = kubectl, namespace

    def apply(self, *manifests: dict[str, Any]) -> None:
        for each in manifests:
            self.kubectl("-n", self.namespace, "apply", "-f", "-", text=json.dumps(each))

    def run(self, name: str = "demo", **spec: Any) -> None:
        """Apply a run of one supervised phase with these parts of the spec."""
        body = {
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
            # No controller answers, and nobody shall wait for what it cannot save.
            "checkpointing": {"onSuspend": "Skip"},
            "roles": {"trainer": {"cpu": "1"}, "inference": {"replicas": 2, "cpu": "1"}},
        }
        kind = {"apiVersion": "etude.dev/v1alpha1", "kind": "RLRun", "metadata": {"name": name}}
        self.apply({**kind, "spec": {**body, **spec}})

    def patch(self, what: str, name: str, **spec: Any) -> None:
        body = json.dumps({"spec": spec})
        self.kubectl("-n", self.namespace, "patch", what, name, "--type=merge", "-p", body)

    def fail(self, pod: dict[str, Any]) -> None:
        """The container of a pod ends by itself, and its kubelet restarts it."""
        ended = {"exitCode": 1, "reason": "Error", "message": "out of memory"}
        container = {
            "name": "trainer",
            "image": "x",
            "imageID": "x",
            "restartCount": 1,
            "ready": False,
            "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
            "lastState": {"terminated": ended},
        }
        body = json.dumps({"status": {"containerStatuses": [container]}})
        words = ("patch", "pod", pod["metadata"]["name"], "--subresource=status")
        self.kubectl("-n", self.namespace, *words, "--type=merge", "-p", body)

    def every(self, kinds: str) -> list[dict[str, Any]]:
        words = ("-n", self.namespace, "get", kinds, "-o", "json")
        items: list[dict[str, Any]] = json.loads(self.kubectl(*words))["items"]
        return items

    def names(self, kinds: str) -> list[str]:
        return sorted(each["metadata"]["name"] for each in self.every(kinds))

    def get(self, what: str, name: str) -> dict[str, Any]:
        found = (m for m in self.every(what) if m["metadata"]["name"] == name)
        return next(found, {})

    def status(self, name: str = "demo") -> dict[str, Any]:
        found: dict[str, Any] = self.get("rlr", name).get("status", {})
        return found

    def condition(self, kind: str, name: str = "demo") -> tuple[str, str]:
        conditions = self.status(name).get("conditions", ())
        found: dict[str, str] = next((c for c in conditions if c["type"] == kind), {})
        return found.get("status", ""), found.get("reason", "")

    def until(self, what: str, holds: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while not holds():
            assert time.monotonic() < deadline_s, f"never happened: {what}; {self.status()}"
            time.sleep(0.25)
