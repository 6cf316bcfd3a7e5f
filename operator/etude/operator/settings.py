"""Settings of the operator, from its environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from etude.common.settings_fields import parse_names, parse_port
from etude.common.tls.identity import DOMAIN
from etude.common.tls.material import read_bundle
from etude.operator.builders.certificates import CertificateMode, CertManagerIssuer, PlatformTls
from etude.operator.builders.platform import Platform

RATE_PER_S = 500
"""Enough for 20 new runs per second; API servers shed load before this harms them."""
PARTS = ("trainer", "inference", "rewards", "envserver", "operator", "gateway", "feedback")


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
    """Namespaces that the operator serves; all if empty."""
    host: str
    probe_port: int
    scaler_port: int | None
    """Port of the scaler for KEDA, of pools in mode External; unset disables it."""
    kubeconfig: Path | None
    """Used outside a cluster; unset inside one."""
    otlp_endpoint: str | None
    """Collector of trace spans; unset disables them."""
    api_requests_per_s: float
    """Rate limit of requests to the API server."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Read the settings.

        Raises:
            KeyError: naming a variable that is not set.
            ValueError: naming a variable that cannot be read.
        """
        is_inside = "KUBERNETES_SERVICE_HOST" in env and not env.get("KUBECONFIG")
        return cls(
            platform=Platform(
                images={part: env[f"ETUDE_IMAGE_{part.upper()}"] for part in PARTS},
                allows_weak_isolation=env.get("ETUDE_ALLOW_WEAK_ISOLATION", "0") == "1",
                host_seccomp_profile=env.get("ETUDE_NODE_SECCOMP_PROFILE") or None,
                namespace=env["ETUDE_NAMESPACE"],
                node_pools=frozenset(parse_names(env, "ETUDE_NODE_POOLS")),
                kvm_resource=env.get("ETUDE_KVM_RESOURCE") or None,
                tls=_tls(env),
                integrations=frozenset(parse_names(env, "ETUDE_INTEGRATIONS")),
            ),
            pod=env["ETUDE_POD"],
            namespace=env["ETUDE_NAMESPACE"],
            lease=env.get("ETUDE_LEASE", "etude-operator"),
            namespaces=parse_names(env, "ETUDE_WATCH_NAMESPACES"),
            host=env.get("ETUDE_HOST", "127.0.0.1"),
            probe_port=parse_port(env, "ETUDE_PROBE_PORT", 8080),
            scaler_port=parse_port(env, "ETUDE_SCALER_PORT", 0) or None,
            kubeconfig=None if is_inside else _kubeconfig(env),
            otlp_endpoint=env.get("ETUDE_OTLP_ENDPOINT")
            or env.get("OTEL_EXPORTER_OTLP_ENDPOINT")
            or None,
            api_requests_per_s=_rate(env, "ETUDE_API_REQUESTS_PER_S"),
        )


def _tls(env: Mapping[str, str]) -> PlatformTls:
    text = env["ETUDE_TLS_MODE"]
    if text not in set(CertificateMode):
        raise ValueError(f"ETUDE_TLS_MODE: {text!r} is not one of {', '.join(CertificateMode)}")
    mode = CertificateMode(text)
    return PlatformTls(
        mode=mode,
        domain=env.get("ETUDE_TLS_DOMAIN") or DOMAIN,
        lifetime_hours=_hours(env),
        secret=env["ETUDE_TLS_SECRET"] if mode is CertificateMode.SECRET else "",
        issuer=_issuer(env) if mode is CertificateMode.CERT_MANAGER else None,
        target=env["ETUDE_TLS_ISSUER"] if mode is CertificateMode.SELF_MANAGED else "",
        trust=_trust(Path(env["ETUDE_TLS_TRUST"])) if mode is CertificateMode.SELF_MANAGED else "",
    )


def _issuer(env: Mapping[str, str]) -> CertManagerIssuer:
    return CertManagerIssuer(
        name=env["ETUDE_TLS_ISSUER_NAME"],
        kind=env["ETUDE_TLS_ISSUER_KIND"],
        group=env["ETUDE_TLS_ISSUER_GROUP"],
    )


def _hours(env: Mapping[str, str]) -> int:
    text = env.get("ETUDE_TLS_LIFETIME_HOURS", "24")
    if not text.isdecimal() or not int(text):
        raise ValueError(f"ETUDE_TLS_LIFETIME_HOURS: {text!r} is not a positive number of hours")
    return int(text)


def _trust(folder: Path) -> str:
    found = read_bundle(folder)
    if not found:
        raise ValueError(f"ETUDE_TLS_TRUST: no certificate in {folder}")
    return found.decode()


def _kubeconfig(env: Mapping[str, str]) -> Path:
    given = env.get("KUBECONFIG", "").split(os.pathsep)[0]
    return Path(given) if given else Path(env.get("HOME", "/")) / ".kube" / "config"


def _rate(env: Mapping[str, str], name: str) -> float:
    text = env.get(name, str(RATE_PER_S))
    if not text.isdecimal() or not int(text):
        raise ValueError(f"{name}: {text!r} is not a positive whole number")
    return float(text)
