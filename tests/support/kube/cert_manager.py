"""A stand-in for cert-manager: signs what Certificates ask for and writes their Secrets."""

import base64
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support import pki
from tests.support.kube.testbeds import Program

from etude.common.tls.identity import Identity

CRD = Path(__file__).parents[2] / "cluster" / "cert_manager_crd.yaml"


@dataclass
class CertManager:
    """One CA, which is the issuer of every Certificate."""

    kubectl: Program
    authority: pki.Authority = field(default_factory=lambda: pki.Authority("cert-manager"))

    def install(self) -> None:
        """Serve the kind."""
        self.kubectl("apply", "-f", str(CRD))
        self.kubectl("wait", "--for=condition=Established", "crd/certificates.cert-manager.io")

    def certificates(self, namespace: str) -> list[dict[str, Any]]:
        """What is asked for."""
        words = ("-n", namespace, "get", "certificates.cert-manager.io", "-o", "json")
        found: list[dict[str, Any]] = json.loads(self.kubectl(*words))["items"]
        return found

    def sign(self, namespace: str) -> dict[str, dict[str, bytes]]:
        """Write a new Secret for each Certificate of a namespace; their files, by its name."""
        made = {}
        for each in self.certificates(namespace):
            (uri,) = each["spec"]["uris"]
            identity = Identity.parse(uri)
            assert each["spec"]["dnsNames"][0] == identity.server_name
            name = each["spec"]["secretName"]
            made[name] = self.authority.issue(identity)
            self._write(namespace, name, made[name])
        return made

    def _write(self, namespace: str, name: str, files: dict[str, bytes]) -> None:
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": namespace},
            "type": "kubernetes.io/tls",
            "data": {key: base64.b64encode(data).decode() for key, data in files.items()},
        }
        self.kubectl("apply", "-f", "-", text=json.dumps(secret))


def mounted(kubectl: Program, namespace: str, secret: str) -> dict[str, bytes]:
    """The files of a Secret, as a pod would find them."""
    found = json.loads(kubectl("-n", namespace, "get", "secret", secret, "-o", "json"))
    return {name: base64.b64decode(text) for name, text in found["data"].items()}
