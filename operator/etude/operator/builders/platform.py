"""Platform: configuration of the operator's installation."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from etude.common.api.kinds import EnvPool
from etude.operator import names
from etude.operator.builders.certificates import PlatformTls
from etude.operator.builders.pod import env
from etude.operator.manifests import Manifest

COMMANDS: Mapping[str, tuple[str, ...]] = {
    names.TRAINER: ("etude-trainer",),
    names.INFERENCE: ("etude-inference",),
    names.REWARDS: ("etude-rewards",),
    names.BROKER: ("etude-envserver", "broker"),
    names.HOST: ("etude-envserver", "node"),
    names.ENVIRONMENT_API: ("etude-envserver", "edge"),
    names.GATEWAY: ("etude-gateway",),
    names.FEEDBACK: ("etude-feedback",),
    names.STABLE: ("etude-inference",),
    names.CANARY: ("etude-inference",),
}
"""Commands of the roles, in the images of the platform."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """Configuration of the operator's installation, the same for every object."""

    images: Mapping[str, str] = field(default_factory=dict)
    """Default image of trainer, inference, rewards, envserver, gateway and feedback."""
    has_shared_files: bool = False
    """file:// means the same folder in every role: true on the local runtime."""
    allows_weak_isolation: bool = False
    """Pools may ask for isolation.minimum Process."""
    traces_file: str | None = None
    """File for trace spans that every role can append to."""
    host_seccomp_profile: str | None = None
    """Seccomp profile of environment nodes that lets them make namespaces; the runtime's default
    does not, and the restricted standard allows a Localhost profile."""
    namespace: str | None = None
    """The operator's namespace, which NetworkPolicies admit; None on the local runtime."""
    tls: PlatformTls | None = None
    """TLS configuration; None on the local runtime."""
    integrations: frozenset[str] = frozenset()
    """Names of the enabled integrations with other projects."""
    node_pools: frozenset[str] = frozenset()
    """NAMESPACE/NAME of the pools whose hosts are privileged pods that the chart makes."""
    kvm_resource: str | None = None
    """Device plugin resource for /dev/kvm; without it microVMs are emulated."""


def has_own_nodes(platform: Platform, pool: EnvPool) -> bool:
    """Return true if a pool's hosts are privileged pods of the chart, not the operator's."""
    return f"{pool.metadata.namespace}/{pool.metadata.name}" in platform.node_pools


def traces_env(platform: Platform) -> list[Manifest]:
    """Environment variable with the file of trace spans, on the local runtime."""
    return [] if platform.traces_file is None else [env("ETUDE_TRACES_FILE", platform.traces_file)]
