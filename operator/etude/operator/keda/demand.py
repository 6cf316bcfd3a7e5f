"""Demand of pools in mode External."""

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from etude.common.api.autoscaling import ScalingMode
from etude.common.api.kinds import EnvPool
from etude.common.errors import InvalidFieldError, UnavailableError, UnknownIdError, WrongStateError
from etude.operator.cluster.api import Cluster
from etude.operator.manifests import Ref

METRIC = "etude-slots"
POOL, UTILIZATION = "pool", "targetUtilizationPercent"
"""Keys of a trigger's metadata."""
USUAL_PERCENT = 80


@dataclass(frozen=True, slots=True)
class Demands:
    """Demand of all pools, read from their statuses, which every replica caches."""

    cluster: Cluster

    def slots(self, namespace: str, metadata: Mapping[str, str]) -> int:
        """Slots of a trigger's pool that are leased, opening or waited for now.

        Or that plans ask for within the startup time of a replica, if those are more.

        Raises:
            InvalidFieldError: the trigger's metadata is not valid.
            UnknownIdError: the pool does not exist.
            WrongStateError: the pool is not in mode External.
            UnavailableError: its brokers do not report.
        """
        pool = self._external(namespace, metadata)
        told, slots = pool.status.autoscaler, pool.status.slots
        if told.mode != ScalingMode.EXTERNAL or slots is None:
            raise UnavailableError(f"the brokers of EnvPool {pool.metadata.name} do not report yet")
        return max(slots.leased + slots.opening + slots.queued, told.plan_peak)

    def per_replica(self, namespace: str, metadata: Mapping[str, str]) -> float:
        """Slots that one replica should serve; needs no report of a broker.

        Raises:
            InvalidFieldError: the trigger's metadata is not valid.
            UnknownIdError: the pool does not exist.
            WrongStateError: the pool is not in mode External.
        """
        pool = self._external(namespace, metadata)
        return _percent(metadata) / 100 * pool.spec.slots_per_replica

    def _external(self, namespace: str, metadata: Mapping[str, str]) -> EnvPool:
        """A trigger's pool, in the namespace of its ScaledObject.

        Raises:
            InvalidFieldError: the trigger's metadata is not valid.
            UnknownIdError: the pool does not exist.
            WrongStateError: the pool is not in mode External.
        """
        name = metadata.get(POOL, "")
        if not name:
            raise InvalidFieldError(f"scalerMetadata.{POOL}", "is missing: name an EnvPool")
        # Checked by every RPC, so that each of them reports an invalid trigger.
        _percent(metadata)
        pool = self._pool(namespace, name)
        if pool.spec.mode is not ScalingMode.EXTERNAL:
            raise WrongStateError(
                f"EnvPool {name} is in mode {pool.spec.mode}: set spec.autoscaling.mode to External"
            )
        return pool

    def _pool(self, namespace: str, name: str) -> EnvPool:
        manifest = self.cluster.get(Ref("EnvPool", namespace, name))
        if manifest is None:
            raise UnknownIdError(f"no EnvPool {name} in namespace {namespace}")
        try:
            return EnvPool.understood(manifest)
        except ValidationError as cause:
            raise WrongStateError(f"EnvPool {name} is not valid: see its conditions") from cause


def _percent(metadata: Mapping[str, str]) -> int:
    text = metadata.get(UTILIZATION, str(USUAL_PERCENT))
    if not text.isdecimal() or not 1 <= int(text) <= 100:
        raise InvalidFieldError(f"scalerMetadata.{UTILIZATION}", f"{text!r} is not from 1 to 100")
    return int(text)
