"""Control planes with our CRDs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.kube import testbeds

CRDS = Path(__file__).parents[2] / "helm" / "etude" / "files" / "crds"


def installed(state: Mapping[str, Any]) -> None:
    """Have our CRDs established."""
    kubectl = testbeds.program(state, "kubectl")
    kubectl("apply", "-f", str(CRDS))
    kubectl("wait", "--for=condition=Established", "-f", str(CRDS), "--timeout=60s")
