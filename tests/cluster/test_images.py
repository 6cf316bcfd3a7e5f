"""The operator from an image that the Containerfile makes, on a real node."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support import needs
from tests.support.kube import testbeds

ROOT = Path(__file__).parents[2]
UNAVAILABLE = 69
BUILD_LIMIT_S = 1_800
"""Two minutes on an idle machine, and three for Debian; a busy one gets patience."""

State = Mapping[str, Any]
Program = Callable[..., str]

pytestmark = [pytest.mark.long, pytest.mark.timeout(2 * BUILD_LIMIT_S)]


@pytest.fixture(scope="module")
def node() -> Iterator[State]:
    """A node of our own: the release here is installed as users install it."""
    yield from testbeds.cluster("node")


@pytest.fixture(scope="module")
def image(node: State, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The operator's image, on the node."""
    archive = tmp_path_factory.mktemp("image") / "operator.tar"
    program = ROOT / "hack" / "testbed" / "containers.py"
    words = (sys.executable, str(program), "operator", str(archive))
    built = subprocess.run(
        words, capture_output=True, text=True, check=False, timeout=BUILD_LIMIT_S
    )
    if built.returncode == UNAVAILABLE:
        needs.skip(built.stderr.strip(), "cluster")
    assert built.returncode == 0, built.stderr
    brought = testbeds.driver("image", "--index", str(node["index"]), "--archive", str(archive))
    assert brought.returncode == 0, brought.stderr
    return built.stdout.strip()


def test_the_operator_runs_from_its_own_image_alone(node: State, image: str) -> None:
    kubectl, helm = testbeds.program(node, "kubectl"), testbeds.program(node, "helm")
    home = ("--namespace", "etude-system")
    kubectl("create", "namespace", "etude-system")
    label = "pod-security.kubernetes.io/enforce=restricted"
    kubectl("label", "namespace", "etude-system", label)

    words = ("--set", f"image={image}", "--set", "operator.replicas=1", "--wait")
    helm("install", "etude", str(ROOT / "helm" / "etude"), *home, *words, "--timeout", "5m")

    assert "an operator leads and answers" in helm("test", "etude", *home, "--logs")
    asks = "import etude.operator, sys; print(sys.prefix, list(etude.operator.__path__)[0])"
    inside = ("exec", "deployment/etude-operator", "--", "python", "-c", asks)
    where, path = kubectl(*home, *inside).split()
    assert where == "/opt/etude"
    assert Path(path).is_relative_to(where), "the checkout of this machine was imported"
    told = json.loads(kubectl(*home, "get", "pods", "-o", "json"))["items"]
    images = {each["spec"]["containers"][0]["image"] for each in told}
    assert images == {image}
