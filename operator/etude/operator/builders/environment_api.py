"""Environment API of a pool: Service and StatefulSet of the HTTP server of spec.edge."""

from collections.abc import Mapping
from dataclasses import replace

from etude.common.api.kinds import EnvPool
from etude.common.api.pool.environment_api import Edge
from etude.operator import names
from etude.operator.builders.pod import KEYS_FOLDER, Plan, PodCertificate, base_env, env
from etude.operator.builders.ports import PORTS
from etude.operator.builders.run import COMMANDS, brokers
from etude.operator.builders.workload import service, stateful_set
from etude.operator.manifests import Manifest

GRACE_S = 30


def edge_children(
    pool: EnvPool, labels: Mapping[str, str], image: str, certificate: PodCertificate | None = None
) -> list[Manifest]:
    """Service and StatefulSet of the environment API of a pool with spec.edge; at most one pod.

    Sandboxes belong to their API server's process: with a second pod, half of the requests would
    miss theirs, as they would while a Deployment replaces its pod.
    """
    if pool.spec.edge is None:
        return []
    name = names.child(pool.metadata.name, names.EDGE)
    own = {**labels, names.ROLE: names.EDGE}
    plan = replace(_plan(pool, pool.spec.edge, image), certificate=certificate)
    replicas = 0 if pool.spec.is_released else 1
    return [
        service(pool, name, own, PORTS[names.EDGE], is_headless=False),
        stateful_set(pool, name, own, plan, replicas=replicas, attempt=0),
    ]


def _plan(pool: EnvPool, edge: Edge, image: str) -> Plan:
    variables = [
        *base_env(PORTS[names.EDGE], attempt=0),
        env("ETUDE_BROKER_TARGET", ",".join(brokers(pool.metadata.name, pool.spec.brokers))),
        env("ETUDE_EDGE_KEYS", f"{KEYS_FOLDER}/keys"),
        env("ETUDE_EDGE_MAX_SANDBOXES", str(edge.max_sandboxes)),
    ]
    if pool.spec.slot.memory_mib is not None:
        variables.append(env("ETUDE_EDGE_MEMORY_MIB", str(pool.spec.slot.memory_mib)))
    if edge.workspace is not None:
        variables.append(env("ETUDE_EDGE_WORKSPACE", edge.workspace))
    return Plan(
        role=names.EDGE,
        image=image,
        command=COMMANDS[names.EDGE],
        ports=PORTS[names.EDGE],
        env=variables,
        grace_s=GRACE_S,
        keys_secret=edge.keys_ref.name,
    )
