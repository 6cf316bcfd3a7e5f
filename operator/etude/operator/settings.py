"""What the operator reads from its environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from etude.operator.desired.runs import Platform

PARTS = ("trainer", "inference", "rewards", "envserver", "operator")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Environment variables, read once."""

    platform: Platform
    """Images and permissions that hold for every run."""
    pod: str
    """Name of this replica: its identity as a candidate for leadership."""
    namespace: str
    """Namespace of the leader's Lease."""
    lease: str
    """Name of the leader's Lease."""
    namespaces: tuple[str, ...]
    """Namespaces that are served; all of them when empty."""
    host: str
    probe_port: int
    kubeconfig: Path | None
    """Used outside a cluster; unset inside one."""
    otlp_endpoint: str | None

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """The settings, or what is wrong with them.

        Raises:
            KeyError: naming a variable that is not set.
            ValueError: naming a variable that cannot be read.
        """
        is_inside = "KUBERNETES_SERVICE_HOST" in env and not env.get("KUBECONFIG")
        return cls(
            platform=Platform(
                images={part: env[f"ETUDE_IMAGE_{part.upper()}"] for part in PARTS},
                allows_weak_isolation=env.get("ETUDE_ALLOW_WEAK_ISOLATION", "0") == "1",
                node_seccomp_profile=env.get("ETUDE_NODE_SECCOMP_PROFILE") or None,
                namespace=env["ETUDE_NAMESPACE"],
                kvm_resource=env.get("ETUDE_KVM_RESOURCE") or None,
            ),
            pod=env["ETUDE_POD"],
            namespace=env["ETUDE_NAMESPACE"],
            lease=env.get("ETUDE_LEASE", "etude-operator"),
            namespaces=tuple(
                name for name in env.get("ETUDE_WATCH_NAMESPACES", "").split(",") if name
            ),
            host=env.get("ETUDE_HOST", "127.0.0.1"),
            probe_port=_port(env, "ETUDE_PROBE_PORT", "8080"),
            kubeconfig=None if is_inside else _kubeconfig(env),
            otlp_endpoint=env.get("ETUDE_OTLP_ENDPOINT") or None,
        )


def _kubeconfig(env: Mapping[str, str]) -> Path:
    given = env.get("KUBECONFIG", "").split(os.pathsep)[0]
    return Path(given) if given else Path(env.get("HOME", "/")) / ".kube" / "config"


def _port(env: Mapping[str, str], name: str, default: str) -> int:
    text = env.get(name, default)
    if not text.isdecimal() or int(text) > 65_535:
        raise ValueError(f"{name}: {text!r} is no port")
    return int(text)
