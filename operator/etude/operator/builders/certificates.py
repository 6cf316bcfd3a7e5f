"""TLS certificates of pods: cert-manager Certificates, trust ConfigMaps and the renewal sidecar."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from etude.common.api.kinds import EnvPool, EvalRun, PolicyRoute, RLRun
from etude.common.api.meta import NameRef
from etude.common.tls.identity import DOMAIN, Identity
from etude.operator import names
from etude.operator.builders.pod import TLS_FOLDER, PodCertificate, SecretFolder
from etude.operator.builders.workload import Owner, object_head, owner_labels
from etude.operator.manifests import Manifest

TOKEN_FOLDER = "/var/run/etude-token"  # noqa: S105 - a folder
TRUST_FOLDER = "/etc/etude-trust"
SERVING_TLS = "/etc/etude-serving"
"""Folder of the certificate that a port for clients shows."""
SIDECAR = "certificates"
"""Name of the sidecar container that renews a pod's certificate."""
SIDECAR_PORT = 8081
TOKEN_SECONDS = 3_600
"""Lifetime of a token; the kubelet renews it after four fifths."""


class CertificateMode(StrEnum):
    """Source of certificates, the chart's value tls.mode."""

    SELF_MANAGED = "SelfManaged"
    """Each pod asks the chart's own issuer, authenticated by a service account token."""
    CERT_MANAGER = "CertManager"
    """cert-manager writes a Secret for each Certificate that the operator applies."""
    SECRET = "Secret"  # noqa: S105 - a mode
    """The platform's administrators create a Secret in each namespace."""
    PLAINTEXT = "Plaintext"
    """No certificates: connections are not encrypted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CertManagerIssuer:
    """Issuer of cert-manager, or an external one with its API."""

    name: str
    kind: str = "ClusterIssuer"
    group: str = "cert-manager.io"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformTls:
    """TLS configuration of the operator's installation."""

    mode: CertificateMode
    domain: str = DOMAIN
    """Trust domain: the first part of every identity."""
    lifetime_hours: int = 24
    """Lifetime of a certificate, for the modes that issue them."""
    secret: str = ""
    """Name of the Secret in each namespace."""
    issuer: CertManagerIssuer | None = None
    target: str = ""
    """host:port of the chart's own issuer."""
    trust: str = ""
    """PEM certificates of its CA."""


def run_identity(tls: PlatformTls, run: RLRun | EvalRun, role: str) -> Identity:
    """Certificate identity of a role of a run, or of an evaluation, which has no run's name."""
    metadata = run.metadata
    return Identity(domain=tls.domain, namespace=metadata.namespace, run=metadata.name, role=role)


def pool_identity(tls: PlatformTls, pool: EnvPool, role: str) -> Identity:
    """Certificate identity of a pool's part, and of the run that owns the pool."""
    metadata = pool.metadata
    return Identity(
        domain=tls.domain,
        namespace=metadata.namespace,
        run=pool.run,
        pool=metadata.name,
        role=role,
    )


def route_identity(tls: PlatformTls, route: PolicyRoute, role: str) -> Identity:
    """Certificate identity of a route's part."""
    metadata = route.metadata
    return Identity(domain=tls.domain, namespace=metadata.namespace, route=metadata.name, role=role)


def certificate_objects(
    owner: Owner, tls: PlatformTls | None, identities: Sequence[Identity]
) -> list[Manifest]:
    """Objects that a run, a pool or a route owns for the certificates of its parts."""
    match tls.mode if tls is not None else None:
        case CertificateMode.CERT_MANAGER:
            assert tls is not None  # noqa: S101 - it has a mode
            return [_certificate(owner, tls, each) for each in identities]
        case CertificateMode.SELF_MANAGED:
            assert tls is not None  # noqa: S101 - it has a mode
            return [_trust_map(owner, tls)]
        case CertificateMode.SECRET | CertificateMode.PLAINTEXT | None:
            return []


def pod_certificate(tls: PlatformTls | None, identity: Identity) -> PodCertificate | None:
    """Certificate source of one part's pods; None on the local runtime."""
    if tls is None:
        return None
    match tls.mode:
        case CertificateMode.PLAINTEXT:
            return PodCertificate(setting=CertificateMode.PLAINTEXT)
        case CertificateMode.SECRET:
            return PodCertificate(setting=TLS_FOLDER, volumes=[_secret(tls.secret)])
        case CertificateMode.CERT_MANAGER:
            return PodCertificate(setting=TLS_FOLDER, volumes=[_secret(secret_name(identity))])
        case CertificateMode.SELF_MANAGED:
            return _sidecar_certificate(tls, identity)


def asks_issuer(tls: PlatformTls | None) -> bool:
    """Pods get their certificates from the chart's own issuer."""
    return tls is not None and tls.mode is CertificateMode.SELF_MANAGED


def secret_name(identity: Identity) -> str:
    """Name of a part's Certificate, and of the Secret that cert-manager writes for it."""
    return f"{identity.server_name.partition('.')[0]}-tls"


def trust_name(*, run: str = "", pool: str = "", route: str = "") -> str:
    """Name of the ConfigMap with the CA that the pods of a run, pool or route trust initially.

    A pool or a route may have the name of a run that it serves.
    """
    if route:
        return names.child(route, "route-ca")
    return names.child(pool, "ca") if pool else names.child(run, "trust")


def _secret(name: str) -> Manifest:
    # Else every user of the container could read the key, a guest's monitor included.
    return {"name": "tls", "secret": {"secretName": name, "defaultMode": 0o440}}


def _certificate(owner: Owner, tls: PlatformTls, identity: Identity) -> Manifest:
    assert tls.issuer is not None, "CertManager comes with an issuer"  # noqa: S101 - our own mistake
    name = secret_name(identity)
    spec = {
        "secretName": name,
        "duration": f"{tls.lifetime_hours}h0m0s",
        "renewBefore": f"{max(1, tls.lifetime_hours // 3)}h0m0s",
        "privateKey": {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"},
        "uris": [identity.uri],
        "dnsNames": [identity.server_name],
        "usages": ["digital signature", "server auth", "client auth"],
        "issuerRef": {
            "name": tls.issuer.name,
            "kind": tls.issuer.kind,
            "group": tls.issuer.group,
        },
    }
    labels = _labels(owner)
    return {**object_head(owner, "cert-manager.io/v1", "Certificate", name, labels), "spec": spec}


def _trust_map(owner: Owner, tls: PlatformTls) -> Manifest:
    own = owner.metadata.name
    key = {"RLRun": "run", "EvalRun": "run", "EnvPool": "pool", "PolicyRoute": "route"}
    name = trust_name(**{key[owner.kind]: own})
    return {
        **object_head(owner, "v1", "ConfigMap", name, _labels(owner)),
        "data": {"ca.crt": tls.trust},
    }


def _labels(owner: Owner) -> Mapping[str, str]:
    labels = owner_labels(owner)
    if isinstance(owner, EnvPool) and owner.run:
        labels[names.RUN] = owner.run
    return labels


def _sidecar_certificate(tls: PlatformTls, identity: Identity) -> PodCertificate:
    """Certificate from the issuer through the sidecar. The key never leaves the pod's memory."""
    trust = trust_name(run=identity.run, pool=identity.pool, route=identity.route)
    token = {"audience": identity.uri, "expirationSeconds": TOKEN_SECONDS, "path": "token"}
    return PodCertificate(
        setting=TLS_FOLDER,
        volumes=[
            {"name": "tls", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
            {
                "name": "tls-token",
                "projected": {"sources": [{"serviceAccountToken": token}], "defaultMode": 0o440},
            },
            {"name": "tls-trust", "configMap": {"name": trust}},
        ],
        sidecar=renewal_sidecar(tls.target, identity.uri),
    )


def renewal_sidecar(target: str, identity: str) -> Manifest:
    """The sidecar container that renews a pod's certificate.

    It has a certificate before the other containers start, and ends after them.
    """
    settings = {
        "ETUDE_TLS_FOLDER": TLS_FOLDER,
        "ETUDE_TLS_IDENTITY": identity,
        "ETUDE_TLS_ISSUER": target,
        "ETUDE_TLS_TOKEN": f"{TOKEN_FOLDER}/token",
        "ETUDE_TLS_TRUST": TRUST_FOLDER,
        "ETUDE_HOST": "0.0.0.0",  # noqa: S104 - the kubelet probes it
        "ETUDE_PROBE_PORT": str(SIDECAR_PORT),
    }
    return {
        "name": SIDECAR,
        "command": ["python", "-m", "etude.common.tls.sidecar"],
        "restartPolicy": "Always",
        "env": [{"name": name, "value": value} for name, value in settings.items()],
        "ports": [{"name": "keeper", "containerPort": SIDECAR_PORT, "protocol": "TCP"}],
        "startupProbe": {
            "httpGet": {"path": "/readyz", "port": SIDECAR_PORT},
            "periodSeconds": 1,
            "timeoutSeconds": 5,
            "failureThreshold": 600,
        },
        "resources": {"requests": {"cpu": "5m", "memory": "48Mi"}, "limits": {"memory": "128Mi"}},
        "volumeMounts": [
            {"name": "tls", "mountPath": TLS_FOLDER},
            {"name": "tls-token", "mountPath": TOKEN_FOLDER, "readOnly": True},
            {"name": "tls-trust", "mountPath": TRUST_FOLDER, "readOnly": True},
        ],
    }


def serving_tls(secret: NameRef | None) -> list[SecretFolder]:
    """The folder with the certificate of a port for clients, if there is a Secret with one."""
    if secret is None:
        return []
    return [SecretFolder("serving-tls", SERVING_TLS, secret.name, ("tls.crt", "tls.key"))]
