"""Acceptance of pools: checks beyond the schema, each finding with a suggested fix."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from etude.common.api.kinds import EnvPool
from etude.common.api.pool import cron
from etude.common.api.pool.autoscaling import ScalingMode
from etude.common.api.pool.spec import DriverName, EnvPoolSpec, IsolationLevel
from etude.operator.builders.certificates import CertificateMode
from etude.operator.builders.platform import Platform, has_own_nodes
from etude.operator.conditions import ACCEPTED, ConditionFact, false_condition
from etude.operator.reasons import Reason

_ROOT_DRIVERS = (DriverName.FIRECRACKER, DriverName.GVISOR)
"""Drivers that need root, which the restricted Pod Security standard forbids."""


def pool_problem(pool: EnvPool, platform: Platform) -> ConditionFact | None:
    """The first finding against a pool."""
    if pool.spec.isolation.minimum == IsolationLevel.PROCESS and not platform.allows_weak_isolation:
        message = (
            "isolation.minimum Process shares the host's kernel, which is not allowed here:"
            " install the chart with isolation.allowProcess=true, or ask for a stronger minimum"
        )
        return false_condition(ACCEPTED, Reason.WEAK_ISOLATION_NOT_ALLOWED, message)
    if pool.spec.edge is not None and platform.has_shared_files:
        message = (
            "spec.edge: there are no Secrets on one machine; remove it, and start"
            " `etude-envserver edge` with a file of keys"
        )
        return false_condition(ACCEPTED, Reason.INVALID_PARAMETERS, message)
    if _sends_keys_in_the_clear(pool, platform):
        message = (
            "spec.edge.tlsRef: is needed, or the API keys of clients would not be encrypted: name a"
            " Secret with tls.crt and tls.key"
        )
        return false_condition(ACCEPTED, Reason.INVALID_PARAMETERS, message)
    for message in schedule_problems(pool.spec, at="spec"):
        return false_condition(ACCEPTED, Reason.INVALID_PARAMETERS, message)
    if has_own_nodes(platform, pool):
        return _node_pool_problem(pool.spec)
    return driver_problem(pool.spec, platform, at="spec")


def _node_pool_problem(spec: EnvPoolSpec) -> ConditionFact | None:
    """The finding against a pool of privileged nodes, which hold no credentials."""
    store, images = spec.store, spec.images
    problems = (
        (
            spec.mode is not ScalingMode.MANUAL,
            "spec.autoscaling: the chart's nodes give this pool a host on each machine; remove it",
        ),
        (
            store is not None and store.secret_ref is not None and _shares_in_bucket(spec),
            "spec.snapshotsUri: privileged nodes get no credentials, and brokers grant them reads"
            " alone; remove it",
        ),
        (
            store is not None
            and "." not in (urlsplit(store.endpoint or "http://s3.").hostname or ""),
            "spec.store.endpoint: privileged nodes lie in another namespace, and read there: name"
            " the Service with its own, such as http://minio.lab.svc:9000",
        ),
        (
            images is not None and images.pull_secret_ref is not None,
            "spec.images.pullSecretRef: privileged nodes get no credentials; use a mirror that asks"
            " for none, or an OCI layout in spec.store",
        ),
        (
            any(rule.credential is not None for rule in spec.network.listed),
            "spec.network.rules: privileged nodes get no credentials; remove credential",
        ),
    )
    for is_wrong, message in problems:
        if is_wrong:
            return false_condition(ACCEPTED, Reason.INVALID_PARAMETERS, message)
    return None


def _shares_in_bucket(spec: EnvPoolSpec) -> bool:
    return (spec.snapshots_uri or "").startswith("s3://")


def _sends_keys_in_the_clear(pool: EnvPool, platform: Platform) -> bool:
    if pool.spec.edge is None or pool.spec.edge.tls_ref is not None:
        return False
    return platform.tls is not None and platform.tls.mode is not CertificateMode.PLAINTEXT


def driver_problem(spec: EnvPoolSpec, platform: Platform, *, at: str) -> ConditionFact | None:
    """The finding against a pool's driver."""
    driver = spec.isolation.driver
    if driver not in _ROOT_DRIVERS or platform.has_shared_files:
        return None
    message = (
        f"{at}.isolation.driver: {driver} needs root, which no pod of a pool is: have the pool"
        " listed in nodes.pools of the chart, or take QemuMicroVM or Auto"
    )
    return false_condition(ACCEPTED, Reason.INVALID_PARAMETERS, message)


def schedule_problems(spec: EnvPoolSpec, *, at: str) -> Iterator[str]:
    """Problems of a schedule that no schema can express, each with its field and fix."""
    for place, entry in enumerate(spec.autoscaling.schedule if spec.autoscaling else ()):
        found = cron.find_problem(entry.cron, entry.time_zone)
        if found is not None:
            which = f"{at}.autoscaling.schedule[{place}].{found.field}"
            yield f"{which}: {found.what}: {found.fix}"
