"""The processes of one cluster: how each is started, and how we know that it is there."""

import http.client
import json
import os
import signal
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import holder
from layout import Layout

CONTROL = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kwok")
MEMORY_FOR_TIME = ("env", "GOGC=400", "GOMEMLIMIT=4GiB")
"""As it comes, Go's collector takes a sixth of an API server's time, which tests lack beside it."""
READY_S = 60.0
"""Each takes 0.5 to 4 s on an idle machine; a busy one gets patience."""


class Cluster(NamedTuple):
    """A running cluster: where it is, and the process that holds its namespaces."""

    layout: Layout
    init: int


def command(layout: Layout, name: str) -> tuple[str, ...]:
    """How a component is started; every path is absolute."""
    return _COMMANDS[name](layout)


def start(cluster: Cluster, name: str) -> int:
    """Start one component in the cluster's namespaces."""
    words = command(cluster.layout, name)
    if name in CONTROL:
        words = (*MEMORY_FOR_TIME, *words)
    return holder.spawn(cluster.layout, name, holder.enter(cluster.init, words))


def restart(cluster: Cluster, name: str, signal_number: int) -> int:
    """End a component by its recorded pid, wait for its end, start it again.

    Raises:
        RuntimeError: it is not running.
    """
    end(cluster, name, signal_number)
    return start(cluster, name)


def end(cluster: Cluster, name: str, signal_number: int = signal.SIGKILL) -> None:
    """End a component by its recorded pid and wait until it is gone.

    Raises:
        RuntimeError: it is not running.
    """
    pid = holder.recorded(cluster.layout, name)
    if pid is None or not holder.alive(pid):
        raise RuntimeError(f"{name} is not running")
    os.kill(pid, signal_number)
    holder.poll(lambda: not holder.alive(pid), f"the end of {name}", 60)


def wait_for_containerd(cluster: Cluster) -> None:
    """Until the socket answers; kubelet ends at once when it does not."""
    asks = ("ctr", "-a", str(cluster.layout.containerd_socket), "version")
    _wait(cluster.layout, lambda: _succeeds(cluster, asks), "containerd")


def import_image(cluster: Cluster, archive: Path) -> None:
    """Hand an image to containerd, available at once."""
    socket = str(cluster.layout.containerd_socket)
    words = ("ctr", "-a", socket, "-n", "k8s.io", "images", "import", str(archive))
    inside = holder.enter(cluster.init, words)
    subprocess.run(inside, check=True, capture_output=True, timeout=120)


def wait_for_api(layout: Layout) -> None:
    """Until the API server says that it is ready."""
    _wait(layout, lambda: request(layout, "/readyz") == b"ok", "the API server")


def wait_for_node(layout: Layout) -> None:
    """Until the node is Ready and pods are admitted."""
    _wait(layout, lambda: _is_ready(layout, "node-1"), "the node")


def wait_for_account(layout: Layout) -> None:
    """Until the controller manager has made the default account: without it pods are refused."""
    path = "/api/v1/namespaces/default/serviceaccounts/default"
    holder.poll(
        lambda: request(layout, path) is not None, "serviceaccount/default", READY_S, every_s=0.1
    )


def wait_for_address(cluster: Cluster, url: str) -> None:
    """Until a URL inside the cluster answers."""
    asks = ("busybox", "wget", "-q", "-O", "/dev/null", url)
    _wait(cluster.layout, lambda: _succeeds(cluster, asks), url)


def request(layout: Layout, path: str) -> bytes | None:
    """GET as administrator; None for anything but success."""
    context = ssl.create_default_context(cafile=str(layout.pki / "ca.crt"))
    context.load_cert_chain(layout.pki / "admin.crt", layout.pki / "admin.key")
    connection = http.client.HTTPSConnection(layout.node_ip, 6443, timeout=5, context=context)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
    except OSError:
        return None
    finally:
        connection.close()
    return body if response.status == http.HTTPStatus.OK else None


def _wait(layout: Layout, done: Callable[[], bool], what: str) -> None:
    """Poll, but give up at once when a process of the cluster has ended: nobody restarts it."""

    def settled() -> bool:
        dead = [name for name, is_up in running(layout).items() if not is_up]
        if dead:
            raise RuntimeError(f"{', '.join(dead)} ended while waiting for {what}")
        return done()

    holder.poll(settled, what, READY_S, every_s=0.1)


def running(layout: Layout) -> dict[str, bool]:
    """Every process that was started, and whether it lives."""
    return {
        path.name: holder.alive(int(path.read_text(encoding="utf-8")))
        for path in sorted(layout.pids.glob("*"))
    }


def _is_ready(layout: Layout, node: str) -> bool:
    body = request(layout, f"/api/v1/nodes/{node}")
    conditions = json.loads(body)["status"].get("conditions", ()) if body else ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _succeeds(cluster: Cluster, words: tuple[str, ...]) -> bool:
    inside = holder.enter(cluster.init, words)
    return subprocess.run(inside, check=False, capture_output=True, timeout=30).returncode == 0


def _containerd(layout: Layout) -> tuple[str, ...]:
    return ("containerd", "-c", f"{layout.conf}/containerd.toml")


def _etcd(layout: Layout) -> tuple[str, ...]:
    client = "http://127.0.0.1:2379"
    return (
        layout.binary("etcd"),
        *("--data-dir", f"{layout.run}/etcd", "--unsafe-no-fsync"),
        *("--listen-client-urls", client, "--advertise-client-urls", client),
        *("--listen-peer-urls", "http://127.0.0.1:2380"),
    )


def _api_server(layout: Layout) -> tuple[str, ...]:
    pki = layout.pki
    return (
        layout.binary("kube-apiserver"),
        "--etcd-servers=http://127.0.0.1:2379",
        "--bind-address=0.0.0.0",
        "--secure-port=6443",
        f"--advertise-address={layout.node_ip}",
        f"--tls-cert-file={pki}/apiserver.crt",
        f"--tls-private-key-file={pki}/apiserver.key",
        f"--client-ca-file={pki}/ca.crt",
        f"--service-cluster-ip-range={layout.service_range}",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={pki}/sa.pub",
        f"--service-account-signing-key-file={pki}/sa.key",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        f"--kubelet-client-certificate={pki}/apiserver-kubelet.crt",
        f"--kubelet-client-key={pki}/apiserver-kubelet.key",
        f"--kubelet-certificate-authority={pki}/ca.crt",
        "--kubelet-preferred-address-types=InternalIP",
        f"--requestheader-client-ca-file={pki}/front-ca.crt",
        "--requestheader-allowed-names=front-proxy",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={pki}/front-proxy.crt",
        f"--proxy-client-key-file={pki}/front-proxy.key",
        "--max-requests-inflight=2000",
        "--max-mutating-requests-inflight=1000",
        *_audit(layout),
    )


def _audit(layout: Layout) -> tuple[str, ...]:
    if not layout.audit_policy.exists():
        return ()
    return (
        f"--audit-policy-file={layout.audit_policy}",
        f"--audit-log-path={layout.audit_log}",
    )


def _controllers(layout: Layout) -> tuple[str, ...]:
    kubeconfig = f"{layout.conf}/kcm.kubeconfig"
    return (
        layout.binary("kube-controller-manager"),
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        "--use-service-account-credentials=true",
        f"--service-account-private-key-file={layout.pki}/sa.key",
        f"--root-ca-file={layout.pki}/ca.crt",
        f"--cluster-signing-cert-file={layout.pki}/ca.crt",
        f"--cluster-signing-key-file={layout.pki}/ca.key",
        "--controllers=*,-nodeipam,-cloud-node-lifecycle-controller",
        "--kube-api-qps=500",  # 20 by default, which makes a test cluster wait
        "--kube-api-burst=1000",
    )


def _scheduler(layout: Layout) -> tuple[str, ...]:
    kubeconfig = f"{layout.conf}/sched.kubeconfig"
    return (
        layout.binary("kube-scheduler"),
        f"--config={layout.conf}/scheduler.json",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--bind-address=127.0.0.1",
    )


def _kubelet(layout: Layout) -> tuple[str, ...]:
    return (
        layout.binary("kubelet"),
        f"--config={layout.conf}/kubelet.json",
        f"--kubeconfig={layout.conf}/node.kubeconfig",
        "--hostname-override=node-1",
        f"--node-ip={layout.node_ip}",
        f"--root-dir={layout.run}/kubelet",
    )


def _kube_proxy(layout: Layout) -> tuple[str, ...]:
    return (layout.binary("kube-proxy"), f"--config={layout.conf}/kube-proxy.json")


def _coredns(layout: Layout) -> tuple[str, ...]:
    return (layout.binary("coredns"), "-conf", f"{layout.conf}/Corefile")


def _kwok(layout: Layout) -> tuple[str, ...]:
    return (
        layout.binary("kwok"),
        f"--kubeconfig={layout.kubeconfig}",
        f"--config={layout.conf}/kwok.json",
        "--manage-all-nodes=false",
        "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
        f"--cidr={layout.fake_range}",
        f"--node-ip={layout.node_ip}",
        "--node-lease-duration-seconds=40",
    )


_COMMANDS: dict[str, Callable[[Layout], tuple[str, ...]]] = {
    "containerd": _containerd,
    "etcd": _etcd,
    "kube-apiserver": _api_server,
    "kube-controller-manager": _controllers,
    "kube-scheduler": _scheduler,
    "kubelet": _kubelet,
    "kube-proxy": _kube_proxy,
    "coredns": _coredns,
    "kwok": _kwok,
}
NAMES = tuple(_COMMANDS)
