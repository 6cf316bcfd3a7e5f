"""A release whose certificates live for minutes, so that a test sees them end and be replaced."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.support.kube.testbeds import Program

CHART = Path(__file__).parents[3] / "helm" / "etude"
LIFE_S = 120
"""Of a certificate; a third of it is what an issuer may need to start again on a busy machine."""
LIMIT_S = 900
ENCRYPTED = {
    "tls.mode": "SelfManaged",
    "tls.selfManaged.generation": "1",
    "tls.selfManaged.replicas": "1",
    "operator.replicas": "1",
}


class Release(NamedTuple):
    """The release that tests share, which other tests want in the clear and without an operator."""

    helm: Program
    kubectl: Program
    home: str

    def encrypt(self) -> None:
        """Certificates of the chart's own issuer, by its first CA."""
        self._upgrade(ENCRYPTED)
        self._shorten()

    def add_ca(self, generation: int) -> None:
        """A further CA, as a user adds one."""
        self._upgrade({"tls.selfManaged.generation": str(generation)})
        self._shorten()

    def restore(self) -> None:
        """As other tests expect it."""
        self._upgrade({"tls.mode": "Plaintext"})
        # The next test begins with the first CA, which the chart refuses beside a later one.
        self.kubectl("-n", self.home, "delete", "secret", "etude-ca", "--ignore-not-found")
        self.kubectl("-n", self.home, "scale", "deployment/etude-operator", "--replicas=0")
        # An operator that is told to go while it starts works in the clear until it is killed.
        pods = ("pod", "-l", "app.kubernetes.io/component=operator", f"--timeout={LIMIT_S}s")
        self.kubectl("-n", self.home, "wait", "--for=delete", *pods)

    def _upgrade(self, values: Mapping[str, str]) -> None:
        sets = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
        self.helm(
            "upgrade", "etude", str(CHART), "-n", self.home, "--reset-then-reuse-values", *sets
        )

    def _shorten(self) -> None:
        """Lives shorter than the chart's hour; Helm puts the variable back at each upgrade."""
        issuer = ("-n", self.home, "set", "env", "deployment/etude-issuer")
        self.kubectl(*issuer, f"ETUDE_TLS_LIFETIME_SECONDS={LIFE_S}")
        for name in ("issuer", "operator"):
            words = ("rollout", "status", f"deployment/etude-{name}", f"--timeout={LIMIT_S}s")
            self.kubectl("-n", self.home, *words)
