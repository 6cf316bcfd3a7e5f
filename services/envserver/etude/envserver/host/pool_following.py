"""Pool following: a host takes its pool's spec from the brokers, and newer ones as they come.

Rules of egress apply to environments that run as well. Anything else that shapes
environments is for the host's next start: in its turn it drains, and starts again once it is empty.
"""

import logging
from dataclasses import dataclass, field

import grpc

from etude.common.api.pool.network import EgressPolicy
from etude.common.api.pool.spec import EnvPoolSpec
from etude.common.errors import UserError
from etude.common.pools.pool_description import PoolDescription, parse_description
from etude.envserver.drivers.base import Driver
from etude.v1 import environments_pb2, environments_pb2_grpc

log = logging.getLogger(__name__)

ASK_S = 5.0
SHAPING = (
    "images",
    "isolation",
    "slots_per_replica",
    "warm",
    "slot",
    "health",
    "store",
    "snapshots_uri",
    "search",
)
"""Fields that a host reads at its start alone, beside templates."""


async def ask_broker(broker: "environments_pb2_grpc.EnvBrokerServiceAsyncStub") -> PoolDescription:
    """Ask a broker for the pool's spec.

    Raises:
        UserError: it is no valid pool.
    """
    request = environments_pb2.DescribePoolRequest()
    answer = await broker.DescribePool(request, timeout=ASK_S)
    return parse_description(answer.pool_json, "a broker's answer")


@dataclass(slots=True)
class PoolFollower:
    """The spec that a host runs with, and the newest one that its broker has."""

    current: PoolDescription
    driver: Driver
    needs_restart: bool = False
    """True once the newest spec asks for another start."""
    _newest: str = field(init=False)

    def __post_init__(self) -> None:
        self._newest = self.current.revision

    @property
    def revision(self) -> str:
        """Of the spec that the host runs with."""
        return self.current.revision

    async def follow(
        self, revision: str, broker: "environments_pb2_grpc.EnvBrokerServiceAsyncStub"
    ) -> None:
        """Fetch and apply the broker's spec, if it is another one; errors are logged."""
        if not revision or revision == self._newest:
            return
        try:
            found = await ask_broker(broker)
        except grpc.aio.AioRpcError as error:
            log.warning("the pool's new spec was not fetched: %s", error.details())
        except UserError as error:
            log.warning("the pool's new spec is not used: %s", error)
        else:
            self.apply(found)

    def apply(self, new: PoolDescription) -> None:
        """Apply a newer spec, as far as that is possible without another start."""
        old, spec = self.current.pool.spec, new.pool.spec
        templates = {template.name: template.egress for template in spec.templates}
        cut = self.driver.replace_network(spec.network, templates)
        log.info("spec %s of the pool: %d connections were cut", new.revision, cut)
        self._newest = new.revision
        self.needs_restart = asks_for_restart(old, spec)
        if not self.needs_restart:
            self.current = new


def asks_for_restart(old: EnvPoolSpec, new: EnvPoolSpec) -> bool:
    """True if a running host cannot take the newer spec."""
    gets_egress = old.network.egress is EgressPolicy.NONE is not new.network.egress
    return gets_egress or _shape(old) != _shape(new)


def _shape(spec: EnvPoolSpec) -> list[object]:
    templates = [each.model_copy(update={"egress": None}) for each in spec.templates]
    return [templates, *(getattr(spec, name) for name in SHAPING)]
