"""A pool of each driver for all attacks, and the account of them at the end."""

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.attacks.arena import Arena
from tests.attacks.proxied import PROXIED
from tests.support import microvms
from tests.support.pool_client import Pool
from tests.support.pool_processes import Processes

from etude.common import channels
from etude.envserver.drivers.qemu.machine import PROGRAM
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


@pytest.fixture(scope="session", params=["process", "qemu-microvm"])
def processes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Processes]:
    """A pool whose environments are made by one driver."""
    made = Processes(tmp_path_factory.mktemp(request.param))
    made.network = PROXIED
    made.write_pool("Process", "Trusted")
    if request.param == "qemu-microvm":
        if shutil.which(PROGRAM) is None or os.geteuid() != 0:
            if os.environ.get("ETUDE_REQUIRE") == "qemu":
                pytest.fail(f"{PROGRAM} is not installed, or this is not root")
            pytest.skip(f"{PROGRAM} is not installed, or this is not root: make system-deps")
        image = microvms.small_image().folder.as_uri()
        made.write_pool("Process", "Trusted", driver="QemuMicroVM", image=image)
    for role in ("broker", "node"):
        made.start(role)
    for role in ("broker", "node"):
        asyncio.run(made.ready(role))
    yield made
    for role in made.running:
        made.stop(role)
    made.end_machines()


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
