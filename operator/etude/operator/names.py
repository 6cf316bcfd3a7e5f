"""Every name, label, annotation and finalizer that the operator writes."""

import hashlib

MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "etude"

RUN = "etude.dev/run"
POOL = "etude.dev/pool"
ROUTE = "etude.dev/route"
CHECKPOINT = "etude.dev/checkpoint"
"""As a label for selectors, and as an annotation with the whole name, which may be longer."""
SAVED_BY = "etude.dev/saved-by"
"""Label of the Jobs of a run's checkpoints, which may outlive the run and belong to no role."""
EVALUATION = "etude.dev/evaluation"
ROLE = "etude.dev/role"
ATTEMPT = "etude.dev/attempt"

RAY_NODE = "ray.io/node-type"
"""Label of KubeRay: head or worker."""

APPLIED_DIGEST = "etude.dev/applied"
"""Annotation with the digest of the last applied manifest, so that removed fields are noticed."""

RESUME = "etude.dev/resume"
"""Annotation with which a user ends a hold; its value is the time of that hold."""

ADOPTED_BY = "etude.dev/adopted-by"
"""Annotation of an on-demand checkpoint: the uid of the run that adopted it, once."""

CHECKPOINT_DATA = "etude.dev/checkpoint-data"
"""Finalizer of checkpoints whose data is deleted with them."""

TRAINER = "trainer"
INFERENCE = "inference"
REWARDS = "rewards"
BROKER = "broker"
HOST = "node"
ENVIRONMENT_API = "edge"
POLICY = "policy"
"""Name of a run's Service for clients outside; no role."""
JANITOR = "janitor"
GATEWAY = "gateway"
FEEDBACK = "feedback"
STABLE = "stable"
CANARY = "canary"
"""Engines of a route's channels have the names of the channels."""
EVALUATOR = "evaluator"
"""Job that drives the rollouts of an evaluation."""
ROLES = frozenset(
    {
        *(TRAINER, INFERENCE, REWARDS, BROKER, HOST, ENVIRONMENT_API, JANITOR),
        *(GATEWAY, FEEDBACK, STABLE, CANARY, EVALUATOR),
    }
)
"""Roles of the operator's pods; labels of other pods may have any value."""

RUN_FIELD_MANAGER = "etude/rlrun"
POOL_FIELD_MANAGER = "etude/envpool"
CHECKPOINT_FIELD_MANAGER = "etude/checkpoint"
ROUTE_FIELD_MANAGER = "etude/policyroute"
EVALUATION_FIELD_MANAGER = "etude/evalrun"

MAX_NAME = 40
MAX_LABEL = 63


def child(owner: str, role: str) -> str:
    """A workload, Service or ConfigMap of a run or pool."""
    return f"{owner}-{role}"


def pod(workload: str, ordinal: int) -> str:
    """A pod as a StatefulSet names it."""
    return f"{workload}-{ordinal}"


def ordinal(pod: str) -> int:
    """The ordinal in a pod's name."""
    return int(pod.rpartition("-")[2])


def label(name: str) -> str:
    """A name as the value of a label; a long one is cut and no longer unique."""
    return name[:MAX_LABEL].rstrip("-._")


def address(workload: str, port: int, ordinal: int = 0) -> str:
    """A pod of a workload behind its headless Service, from the same namespace."""
    return f"{pod(workload, ordinal)}.{workload}:{port}"


def own_pool(run: str, environment: str) -> str:
    """The pool that a run owns for one of its environments, short enough for its own children."""
    name = f"{run}-{environment}"
    if len(name) <= MAX_NAME:
        return name
    return f"{name[:33]}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def checkpoint(run: str, *, step: int, manifest_digest: str) -> str:
    """A checkpoint; repeated reports of one state give one name."""
    return f"{run}-s{step:08d}-{manifest_digest[:6]}"


def evaluation(route: str, number: int, digest: str) -> str:
    """An evaluation that a route makes, of a version with this number."""
    end = f"-v{number}-{digest[:8]}"
    return f"{route[: MAX_NAME - len(end)].rstrip('-')}{end}"
