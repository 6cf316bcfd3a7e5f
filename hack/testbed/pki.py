"""Keys and certificates of one cluster, made by openssl."""

import subprocess
from pathlib import Path
from typing import NamedTuple

from layout import Layout

CLIENT = "clientAuth"
SERVER = "serverAuth"
DAYS = "3650"


class Leaf(NamedTuple):
    """One certificate: whose it is, what it may do, where it is valid."""

    name: str
    subject: str
    usage: str
    names: tuple[str, ...] = ()
    authority: str = "ca"


def create(layout: Layout) -> None:
    """Two authorities, the service-account keys and every leaf."""
    layout.pki.mkdir(parents=True, exist_ok=True)
    for name in ("ca", "front-ca"):
        _authority(layout.pki, name)
    _openssl(layout.pki, "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "sa.key")
    _openssl(layout.pki, "ec", "-in", "sa.key", "-pubout", "-out", "sa.pub")
    for leaf in leaves(layout):
        _leaf(layout.pki, leaf)


def leaves(layout: Layout) -> list[Leaf]:
    """Every certificate of the cluster."""
    api_names = (
        *("DNS:localhost", "DNS:kubernetes", "DNS:kubernetes.default"),
        *("DNS:kubernetes.default.svc", "DNS:kubernetes.default.svc.cluster.local"),
        *("IP:127.0.0.1", f"IP:{layout.node_ip}", f"IP:{layout.api_ip}"),
    )
    node_names = ("DNS:node-1", f"IP:{layout.node_ip}", "IP:127.0.0.1")
    return [
        Leaf("apiserver", "/CN=kube-apiserver", SERVER, api_names),
        Leaf("apiserver-kubelet", "/CN=kube-apiserver-kubelet-client", CLIENT),
        Leaf("admin", "/O=system:masters/CN=admin", CLIENT),
        Leaf("kcm", "/CN=system:kube-controller-manager", CLIENT),
        Leaf("sched", "/CN=system:kube-scheduler", CLIENT),
        Leaf("proxy", "/CN=system:kube-proxy", CLIENT),
        Leaf("dns", "/CN=system:coredns", CLIENT),
        Leaf("node", "/O=system:nodes/CN=system:node:node-1", f"{SERVER},{CLIENT}", node_names),
        Leaf("front-proxy", "/CN=front-proxy", CLIENT, authority="front-ca"),
    ]


def _authority(folder: Path, name: str) -> None:
    extensions = ["basicConstraints = critical,CA:TRUE", "keyUsage = critical,keyCertSign,cRLSign"]
    _request(folder, name, f"/CN={name}", extensions)


def _leaf(folder: Path, leaf: Leaf) -> None:
    extensions = ["basicConstraints = critical,CA:FALSE", f"extendedKeyUsage = {leaf.usage}"]
    if leaf.names:
        extensions.append("subjectAltName = " + ",".join(leaf.names))
    signed_by = ("-CA", f"{leaf.authority}.crt", "-CAkey", f"{leaf.authority}.key")
    _request(folder, leaf.name, leaf.subject, extensions, *signed_by)


def _request(folder: Path, name: str, subject: str, extensions: list[str], *signed_by: str) -> None:
    lines = ["[req]", "distinguished_name = dn", "[dn]", "[ext]", *extensions]
    (folder / f"{name}.cnf").write_text("\n".join(lines) + "\n", encoding="utf-8")
    _openssl(
        folder,
        *("req", "-x509", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
        *("-nodes", "-days", DAYS, "-subj", subject, "-config", f"{name}.cnf"),
        *("-extensions", "ext", "-keyout", f"{name}.key", "-out", f"{name}.crt", *signed_by),
    )


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(("openssl", *arguments), cwd=folder, check=True, capture_output=True, timeout=60)
