"""Where everything of one cluster is: addresses, folders, files."""

from dataclasses import dataclass
from pathlib import Path

MAX_CLUSTERS = 56
"""Pod ranges are 10.200 to 10.255, one per cluster."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One cluster of this machine; everything that could collide comes from its number."""

    run: Path
    index: int
    binaries: Path

    @property
    def name(self) -> str:
        """Name of its cgroup."""
        return f"etude-testbed-{self.index}"

    @property
    def link(self) -> str:
        """The host's end of the cable into the cluster."""
        return f"tb{self.index}h"

    @property
    def host_ip(self) -> str:
        """The host, as pods see it."""
        return f"10.255.{self.index}.1"

    @property
    def node_ip(self) -> str:
        """The node, as everyone sees it."""
        return f"10.255.{self.index}.2"

    @property
    def service_range(self) -> str:
        """Addresses of Services."""
        return f"10.{100 + self.index}.0.0/16"

    @property
    def api_ip(self) -> str:
        """The Service of the API server."""
        return f"10.{100 + self.index}.0.1"

    @property
    def dns_ip(self) -> str:
        """The Service of DNS."""
        return f"10.{100 + self.index}.0.10"

    @property
    def pod_range(self) -> str:
        """Addresses of pods."""
        return f"10.{200 + self.index}.0.0/24"

    @property
    def fake_range(self) -> str:
        """Addresses of pods that kwok pretends to run; whoever is inside listens on all of them."""
        return "10.245.0.0/16"

    @property
    def server(self) -> str:
        """URL of the API server."""
        return f"https://{self.node_ip}:6443"

    @property
    def pki(self) -> Path:
        """Keys and certificates."""
        return self.run / "pki"

    @property
    def conf(self) -> Path:
        """Configuration files."""
        return self.run / "conf"

    @property
    def logs(self) -> Path:
        """One log per process."""
        return self.run / "log"

    @property
    def pids(self) -> Path:
        """One file per process, with its pid on the host."""
        return self.run / "pid"

    @property
    def state(self) -> Path:
        """What `up` decided, as JSON."""
        return self.run / "cluster.json"

    @property
    def audit_policy(self) -> Path:
        """Whose requests the API server writes down; without the file it writes down nobody's."""
        return self.conf / "audit.json"

    @property
    def audit_log(self) -> Path:
        """A JSON object for each of those requests."""
        return self.logs / "audit.log"

    @property
    def containerd_socket(self) -> Path:
        """Where containerd listens."""
        return self.run / "ctrd" / "c.sock"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig; works on the host too."""
        return self.conf / "admin.kubeconfig"

    def binary(self, name: str) -> str:
        """Path of one of our own programs."""
        return str(self.binaries / name)
