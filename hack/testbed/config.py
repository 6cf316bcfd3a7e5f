"""Configuration files of every component of one cluster."""

import json
import subprocess
from pathlib import Path
from typing import Any

from layout import Layout

KUBECONFIGS = ("admin", "kcm", "sched", "proxy", "dns", "node")
DISABLED_PLUGINS = (
    *("io.containerd.internal.v1.opt", "io.containerd.internal.v1.tracing"),
    *(f"io.containerd.snapshotter.v1.{name}" for name in ("btrfs", "zfs", "aufs", "devmapper")),
)


def write(layout: Layout, *, trees: list[Path]) -> None:
    """All of them; trees are host folders that every container sees, read-only."""
    (layout.conf / "cni").mkdir(parents=True, exist_ok=True)
    for name in KUBECONFIGS:
        _json(layout.conf / f"{name}.kubeconfig", _kubeconfig(layout, name))
    _json(layout.conf / "scheduler.json", _scheduler(layout))
    _json(layout.conf / "kubelet.json", _kubelet(layout))
    _json(layout.conf / "kube-proxy.json", _kube_proxy(layout))
    _json(layout.conf / "base.json", _base(layout))
    _json(layout.conf / "kwok.json", _kwok())
    _json(layout.conf / "cni" / "10-bridge.conflist", _network(layout))
    (layout.conf / "containerd.toml").write_text(_containerd(layout), encoding="utf-8")
    (layout.conf / "Corefile").write_text(_corefile(layout), encoding="utf-8")
    _json(layout.conf / "oci-base.json", _container(trees))


def write_audit_policy(layout: Layout, user: str) -> None:
    """Have every request of one user written down, without what it carries."""
    rules = [{"level": "Metadata", "users": [user]}, {"level": "None"}]
    policy = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": rules}
    _json(layout.audit_policy, policy | {"omitStages": ["RequestReceived"]})


def _json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _kubeconfig(layout: Layout, user: str) -> dict[str, Any]:
    pki = layout.pki
    cluster = {"server": layout.server, "certificate-authority": f"{pki}/ca.crt"}
    credentials = {"client-certificate": f"{pki}/{user}.crt", "client-key": f"{pki}/{user}.key"}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "testbed",
        "clusters": [{"name": "testbed", "cluster": cluster}],
        "users": [{"name": user, "user": credentials}],
        "contexts": [{"name": "testbed", "context": {"cluster": "testbed", "user": user}}],
    }


def _scheduler(layout: Layout) -> dict[str, Any]:
    client = {"kubeconfig": f"{layout.conf}/sched.kubeconfig", "qps": 500, "burst": 1000}
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": client,
    }


def _kubelet(layout: Layout) -> dict[str, Any]:
    pki = layout.pki
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": "0.0.0.0",  # noqa: S104 inside a network namespace of its own
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{pki}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{pki}/node.crt",
        "tlsPrivateKeyFile": f"{pki}/node.key",
        "containerRuntimeEndpoint": f"unix://{layout.containerd_socket}",
        "failCgroupV1": False,  # refused otherwise since 1.35
        "cgroupDriver": "cgroupfs",
        # Without a root of its own, two kubelets would delete each other's pods' cgroups.
        "cgroupRoot": f"/{layout.name}",
        "failSwapOn": False,
        "oomScoreAdj": 0,  # the default of -999 needs CAP_SYS_RESOURCE
        "makeIPTablesUtilChains": False,
        "clusterDNS": [layout.dns_ip],
        "clusterDomain": "cluster.local",
        "resolvConf": "",
        "maxPods": 250,
        # A full developer disk must not delete images that cannot be pulled again.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "evictionHard": {
            "memory.available": "50Mi",
            **{f"{fs}.{what}": "0%" for fs in ("nodefs", "imagefs") for what in _FREE},
        },
        "nodeStatusUpdateFrequency": "5s",
    }


_FREE = ("available", "inodesFree")


def _kube_proxy(layout: Layout) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": f"{layout.conf}/proxy.kubeconfig"},
        "hostnameOverride": "node-1",
        "mode": "nftables",
        "clusterCIDR": layout.pod_range,
        "oomScoreAdj": 0,
        # Leave conntrack sysctls alone: nf_conntrack_max belongs to the host.
        "conntrack": {
            "maxPerCore": 0,
            "min": 0,
            "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s",
        },
        "nftables": {"minSyncPeriod": "100ms", "syncPeriod": "30s"},
    }


def _kwok() -> dict[str, Any]:
    # 4 at a time by default, which makes 1,000 pods wait for three times as long.
    return {
        "apiVersion": "config.kwok.x-k8s.io/v1alpha1",
        "kind": "KwokConfiguration",
        "options": {"podPlayStageParallelism": 16, "nodePlayStageParallelism": 16},
    }


def _network(layout: Layout) -> dict[str, Any]:
    addresses = {
        "type": "host-local",
        "ranges": [[{"subnet": layout.pod_range}]],
        "routes": [{"dst": "0.0.0.0/0"}],
        "dataDir": f"{layout.run}/ipam",
    }
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": addresses,
    }
    return {"cniVersion": "1.0.0", "name": "tb", "plugins": [bridge]}


def _base(layout: Layout) -> dict[str, Any]:
    """What a cluster needs before its first pod: rights for logs and DNS, and the DNS Service."""
    group = "rbac.authorization.k8s.io"
    reads = [
        {"apiGroups": [""], "resources": ["services", "pods", "namespaces", "endpoints"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"]},
    ]
    ports = [{"name": "dns-tcp", "port": 53, "protocol": "TCP"}]
    ports.append({"name": "dns", "port": 53, "protocol": "UDP"})
    return {
        "apiVersion": "v1",
        "kind": "List",
        "items": [
            _binding(
                "testbed-kubelet", "system:kubelet-api-admin", "kube-apiserver-kubelet-client"
            ),
            {
                "apiVersion": f"{group}/v1",
                "kind": "ClusterRole",
                "metadata": {"name": "testbed-dns"},
                "rules": [rule | {"verbs": ["list", "watch"]} for rule in reads],
            },
            _binding("testbed-dns", "testbed-dns", "system:coredns"),
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": "kube-dns", "namespace": "kube-system"},
                "spec": {"clusterIP": layout.dns_ip, "ports": ports},
            },
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {
                    "name": "kube-dns",
                    "namespace": "kube-system",
                    "labels": {"kubernetes.io/service-name": "kube-dns"},
                },
                "addressType": "IPv4",
                "endpoints": [{"addresses": [layout.node_ip]}],
                "ports": ports,
            },
        ],
    }


def _binding(name: str, role: str, user: str) -> dict[str, Any]:
    group = "rbac.authorization.k8s.io"
    return {
        "apiVersion": f"{group}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": group, "kind": "User", "name": user}],
    }


def _containerd(layout: Layout) -> str:
    run = layout.run
    plugins = ", ".join(f'"{name}"' for name in DISABLED_PLUGINS)
    return f"""\
version = 2
root = "{run}/ctrd/root"
state = "{run}/ctrd/state"
oom_score = 0
disabled_plugins = [{plugins}]
[grpc]
  address = "{layout.containerd_socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  restrict_oom_score_adj = true
  disable_tcp_service = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{layout.conf}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      base_runtime_spec = "{layout.conf}/oci-base.json"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
"""


def _corefile(layout: Layout) -> str:
    return f"""\
cluster.local:53 in-addr.arpa:53 {{
  bind {layout.node_ip}
  ready 127.0.0.1:8181
  kubernetes cluster.local in-addr.arpa {{
    kubeconfig {layout.conf}/dns.kubeconfig
    pods insecure
  }}
  errors
  cache 5
  loadbalance
}}
"""


def _container(trees: list[Path]) -> dict[str, Any]:
    """What every container starts from: containerd's own default, and the trees bound read-only.

    A bind by containerd is invisible to Kubernetes, so charts run unmodified and Pod Security
    `restricted` has nothing to refuse; a hostPath volume would be refused.

    Raises:
        RuntimeError: pods would not see one of the trees.
    """
    for tree in trees:
        if tree.is_relative_to("/tmp"):  # noqa: S108 - where pods have a volume, not a file of ours
            raise RuntimeError(f"{tree} is hidden by every pod's own /tmp: move it elsewhere")
    default = subprocess.run(("ctr", "oci", "spec"), check=True, capture_output=True, timeout=60)
    spec: dict[str, Any] = json.loads(default.stdout)
    spec["process"].pop("rlimits", None)  # it would set NOFILE to 1024
    spec["mounts"] += [
        {
            "type": "bind",
            "source": str(tree),
            "destination": str(tree),
            "options": ["rbind", "ro", "nosuid", "nodev"],
        }
        for tree in trees
    ]
    return spec
