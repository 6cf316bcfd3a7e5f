"""A pool of each driver for all attacks, and the account of them at the end."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.attacks.arena import Arena
from tests.attacks.proxied import PROXIED
from tests.support import needs
from tests.support.environments.pool_client import Pool
from tests.support.environments.pool_processes import Processes
from tests.support.vm import gvisors

from etude.common.rpc import channels
from etude.v1 import environments_pb2_grpc

OUT = Path(__file__).parents[2] / "bench" / "out" / "attacks.json"
DEADLINE_S = 300.0
"""An attack on a busy machine that translates instructions; its own limit comes first."""


@dataclass(slots=True)
class Account:
    """Attacks by their name and driver, and what each reached."""

    reached: dict[str, str] = field(default_factory=dict)

    def write(self) -> None:
        """Leave it where benches leave theirs."""
        succeeded = {name: what for name, what in self.reached.items() if what}
        row = {"attacks": len(self.reached), "succeeded": len(succeeded), "which": succeeded}
        OUT.parent.mkdir(parents=True, exist_ok=True)
        OUT.write_text(json.dumps(row, indent=1) + "\n")


@pytest.fixture(scope="session")
def account(request: pytest.FixtureRequest) -> Iterator[Account]:
    kept = Account()
    yield kept
    kept.write()
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    succeeded = sum(bool(what) for what in kept.reached.values())
    if reporter is not None:
        reporter.write_line(f"\n{len(kept.reached)} attacks, {succeeded} succeeded")


def _processes(made: Processes) -> None:
    made.write_pool("Process", "Trusted")


def _machines(made: Processes) -> None:
    needs.machines()
    image = needs.small_image("qemu").folder.as_uri()
    made.write_pool("Process", "Trusted", driver="QemuMicroVM", image=image)


def _containers(made: Processes) -> None:
    needs.containers()
    made.network = {"egress": "None"}
    image = needs.small_image("gvisor", "qemu").folder.as_uri()
    made.write_pool("Sandbox", "Untrusted", driver="GVisor", image=image)


DRIVERS: Mapping[str, Callable[[Processes], None]] = {
    "process": _processes,
    "qemu-microvm": _machines,
    "gvisor": _containers,
}
"""How the pool of each is written, or why there is none."""


@pytest.fixture(scope="session", params=DRIVERS)
def processes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Processes]:
    """A pool whose environments are made by one driver."""
    made = Processes(tmp_path_factory.mktemp(request.param))
    made.network = PROXIED
    DRIVERS[request.param](made)
    for role in ("broker", "node"):
        made.start(role)
    for role in ("broker", "node"):
        asyncio.run(made.ready(role))
    yield made
    for role in made.running:
        made.stop(role)
    made.end_machines()
    gvisors.end_all(made.folder / "scratch")


@pytest.fixture
async def arena(processes: Processes, tmp_path: Path) -> AsyncIterator[Arena]:
    """Two fresh leases of one pool; the second is the neighbour's."""
    host = tmp_path / "host"
    host.mkdir()
    async with channels.dial(f"127.0.0.1:{processes.ports['broker']}") as channel:
        broker = environments_pb2_grpc.EnvBrokerServiceStub(channel)
        pool = Pool(broker, environments_pb2_grpc.PoolServiceStub(channel), "empty:")
        pool.toolset, pool.deadline_s = "Standard", DEADLINE_S
        lease, neighbour = await pool.launch(tmp_path.name, 2)
        made = Arena(processes, pool, lease, neighbour, host)
        await made.prepare()
        yield made
        await made.end()
