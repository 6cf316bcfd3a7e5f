"""The chart as Helm renders it; for that Helm needs no cluster."""

import runpy
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "helm" / "etude"
IMAGE = "localhost/etude-base:1"
NAMESPACE = "etude-system"
KUBERNETES = "1.36.0"
SERVED = tuple(
    word
    for kind in (
        *("monitoring.coreos.com/v1/PodMonitor", "monitoring.coreos.com/v1/PrometheusRule"),
        "cert-manager.io/v1/Certificate",
    )
    for word in ("--api-versions", kind)
)
"""Words for a cluster that has the kinds of the Prometheus Operator and of cert-manager."""
PLAIN = {"mode": "Plaintext"}
"""What tests render that are not about certificates: Helm makes another CA each time."""

Values = Mapping[str, Any]
Manifest = dict[str, Any]


class Rendered(NamedTuple):
    """Every object of a release, in Helm's order."""

    manifests: list[Manifest]

    def of(self, kind: str) -> list[Manifest]:
        """All objects of a kind."""
        return [each for each in self.manifests if each["kind"] == kind]

    def one(self, kind: str, name: str = "") -> Manifest:
        """The only object of a kind, or the one of this name."""
        (found,) = (each for each in self.of(kind) if name in {"", each["metadata"]["name"]})
        return found

    @property
    def pod(self) -> Manifest:
        """The spec of the operator's pods."""
        spec: Manifest = self.one("Deployment")["spec"]["template"]["spec"]
        return spec


def program() -> Path:
    """The Helm that the testbed is built with; it may not be there."""
    return tool("helm")


def tool(name: str) -> Path:
    """A program of the testbed; it may not be there."""
    folder: Path = runpy.run_path(str(ROOT / "hack" / "testbed" / "build.py"))["folder"]()
    return folder / name


def helm(*words: str, values: Values | None = None) -> "subprocess.CompletedProcess[str]":
    """Run Helm; the values come after those of the words."""
    given = () if values is None else ("-f", "-")
    return subprocess.run(
        (str(program()), *words, *given),
        input=None if values is None else yaml.safe_dump(dict(values)),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def template(
    values: Values, *words: str, chart: Path = CHART
) -> "subprocess.CompletedProcess[str]":
    """What `helm template` answers for a release `etude` with an image."""
    words = ("--namespace", NAMESPACE, "--kube-version", KUBERNETES, *words)
    return helm(
        "template", "etude", str(chart), *words, values={"image": IMAGE, "tls": PLAIN, **values}
    )


def rendered(values: Values, *words: str) -> Rendered:
    """Every object that the chart makes of values."""
    done = template(values, *words)
    assert done.returncode == 0, done.stderr
    return Rendered([each for each in yaml.safe_load_all(done.stdout) if each])


def refusal(values: Values, *words: str) -> str:
    """Why Helm does not render these values."""
    done = template(values, *words)
    assert done.returncode != 0, f"{values} is taken"
    return done.stderr
