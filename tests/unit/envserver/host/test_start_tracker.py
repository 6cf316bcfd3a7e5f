"""Environments that begin with their first call: what brokers hear, and what is kept till then."""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tests.support.environments.brokers import lone_service, started
from typing_extensions import override

from etude.agent.workspace.interface import Runner
from etude.common.rpc import server as rpc_server
from etude.common.rpc.broker_addresses import BrokerAddresses
from etude.envserver.broker.broker import Broker
from etude.envserver.broker.host_client import MemoryHostClient
from etude.envserver.broker.pool_report import make_report
from etude.envserver.drivers.base import (
    CommandOutcome,
    DriverReadiness,
    Sandbox,
    SandboxStart,
    StartKind,
    TemplateReadiness,
    Verification,
)
from etude.envserver.drivers.folder_driver import FolderSandbox
from etude.envserver.drivers.in_memory import MemoryDriver
from etude.envserver.host.broker_links import BrokerLinks
from etude.envserver.host.grading.grader import Grader
from etude.envserver.host.heartbeat import HostHeartbeat
from etude.envserver.host.host import Host
from etude.envserver.storage.trees import Tree
from etude.v1 import environments_pb2, environments_pb2_grpc

MakeNode = Callable[..., Host]
Order = Callable[..., environments_pb2.OpenEnvironmentsRequest]


class LateSandbox(FolderSandbox):
    """Tells how it began once it has."""

    start_of: Callable[[], StartKind]
    _begun: SandboxStart | None = None

    @property
    @override
    def sandbox_start(self) -> SandboxStart | None:
        return self._begun

    @override
    async def initialize(self, tree: Tree) -> None:
        await super().initialize(tree)
        self._begun = SandboxStart(self.start_of(), 0.025)


@dataclass(slots=True)
class LateDriver(MemoryDriver):
    """Has some paused clones, and spawns what it has no clone for."""

    start_kind: StartKind | None = None
    paused: int = 0
    kept: Sequence[TemplateReadiness] = field(default_factory=list)

    @override
    def sandbox(self, folder: Path, runner: Runner, *, template: str) -> Sandbox:
        made = LateSandbox(folder, runner, self.run, self.owner())
        made.start_of = self._start
        return made

    @override
    def readiness(self) -> DriverReadiness:
        return DriverReadiness(
            templates=[TemplateReadiness(template="python", paused_clones=self.paused)]
        )

    @override
    def keep_warm(self, wanted: Sequence[TemplateReadiness], *, max_shells: int) -> None:
        self.kept = wanted
        self.paused = sum(each.paused_clones for each in wanted)

    @override
    async def verify(self, work: Verification) -> CommandOutcome:
        outcome = await super(LateDriver, self).verify(work)
        return replace(outcome, sandbox_start=SandboxStart(StartKind.SHELL, 0.025))

    def _start(self) -> StartKind:
        if not self.paused:
            return StartKind.SPAWN
        self.paused -= 1
        return StartKind.PAUSED_CLONE


@pytest.fixture
def driver(tmp_path: Path) -> LateDriver:
    found = LateDriver(tmp_path / "late")
    found.leases.mkdir()
    return found


@pytest.fixture
def node(make_node: MakeNode, driver: LateDriver) -> Host:
    made = make_node()
    return Host(
        driver=driver, sources=made.sources, slots=8, templates={"python"}, endpoint="here:1"
    )


async def called(node: Host, lease_id: str) -> None:
    arguments = '{"target_file": "shop/core.py"}'
    call = environments_pb2.ToolCall(call_id="1", name="read_file", arguments_json=arguments)
    await node.find(lease_id).run_turn([call])


async def test_a_start_is_told_once_and_its_lease_says_it_from_then_on(
    node: Host, order: Order
) -> None:
    await node.open(order("a", "b"))
    assert node.start_tracker.take_beginnings() == []
    assert node.start_tracker.num_awaited() == {"python": 2}

    await called(node, "a")

    ((_, beginning),) = node.start_tracker.take_beginnings()
    assert beginning == environments_pb2.Beginning(
        template="python", start=environments_pb2.START_SPAWN, start_ms=25
    )
    assert node.start_tracker.take_beginnings() == []
    assert node.start_tracker.num_awaited() == {"python": 1}
    starts = {held.lease.lease_id: held.lease.start for held in node.held_leases()}
    assert starts == {
        "a": environments_pb2.START_SPAWN,
        "b": environments_pb2.START_UNSPECIFIED,
    }


async def test_a_lease_that_ended_between_two_heartbeats_is_told_too(
    node: Host, order: Order
) -> None:
    await node.open(order("a", "b"))
    await called(node, "a")
    await node.close(["a", "b"])
    assert len(node.start_tracker.take_beginnings()) == 1
    assert node.start_tracker.num_awaited() == {}


async def test_a_grade_counts_as_a_start_of_its_leases_run(
    node: Host, order: Order, driver: LateDriver
) -> None:
    await node.open(order("a"))
    lease = node.find("a")
    job = environments_pb2.GradeJob(
        command="pytest -q", timeout_seconds=5, reward_path="/logs/reward.txt"
    )
    grader = Grader(driver, node.cache, node.start_tracker)
    for _ in range(2):  # the second time memory knows it
        await grader.grade(lease.source, job, template="python", fork=lease)

    (news,) = node.start_tracker.take_beginnings()
    assert news.beginning.start == environments_pb2.START_SHELL
    assert node.start_tracker.num_awaited() == {}


async def test_a_successor_awaits_what_has_not_begun(
    node: Host, order: Order, driver: LateDriver
) -> None:
    await node.open(order("a", "b"))
    await called(node, "a")

    successor = Host(driver=driver, sources=node.sources, slots=8, templates={"python"})
    await successor.take_over()

    assert successor.start_tracker.num_awaited() == {"python": 1}
    assert successor.start_tracker.take_beginnings() == []


@pytest.fixture
async def broker() -> Broker:
    return started(MemoryHostClient(), "other")


@pytest.fixture
async def heartbeat(node: Host, broker: Broker) -> AsyncIterator[HostHeartbeat]:
    server = rpc_server.Server([])
    environments_pb2_grpc.add_EnvBrokerServiceServicer_to_server(
        lone_service(broker), server.grpc_server
    )
    await server.start()
    links = BrokerLinks(BrokerAddresses(f"127.0.0.1:{server.port}"), "n1")
    yield HostHeartbeat(node, links, "n1")
    await links.close()
    await server.stop(0)


async def test_what_was_made_ready_for_a_lease_stays_until_its_first_call(
    node: Host, order: Order, driver: LateDriver, heartbeat: HostHeartbeat
) -> None:
    await node.open(order("a", "b", "c"))
    driver.paused = 2

    await heartbeat.send()
    assert driver.paused == 2
    await called(node, "a")
    await called(node, "b")
    await node.close(["c"])
    driver.paused = 3
    await heartbeat.send()

    assert driver.paused == 0


async def test_shortages_make_a_broker_ask_for_shells_and_show_in_its_report(
    node: Host, order: Order, broker: Broker, heartbeat: HostHeartbeat
) -> None:
    await node.open(order("a", "b"))
    await called(node, "a")

    for _ in range(2):
        await heartbeat.send()

    broker.warm_targets.refresh(broker.ledger.hosts, now_s=time.monotonic())
    targets = [
        target for name in ("n1", "other") for target in broker.warm_targets.targets_of(name)
    ]
    assert sum(target.shells for target in targets) == 2
    assert [*broker.statistics.warm] == [0.0]
    assert make_report(broker).start_p50_ms == 25


def test_starts_of_templates_that_a_pool_does_not_have_are_not_counted() -> None:
    nodes = MemoryHostClient()
    broker = started(nodes)
    told = nodes.heartbeat("n1")
    told.begun.add(template="elsewhere", start=environments_pb2.START_SPAWN)
    told.begun.add(template="python", start=environments_pb2.START_PAUSED_CLONE, start_ms=3)

    broker.heartbeat(told)

    assert (make_report(broker).warm_percent, make_report(broker).start_p50_ms) == (100, 3)
    assert list(broker.warm_targets._watermarks) == ["python"]


def test_what_a_host_fetches_for_its_first_start_is_told_by_template() -> None:
    nodes = MemoryHostClient()
    broker = started(nodes, "n1", "n2")
    for name, first_ms in (("n1", 9_000), ("n2", 12_000)):
        told = nodes.heartbeat(name)
        told.begun.add(template="python", start=environments_pb2.START_SPAWN, start_ms=first_ms)
        told.begun.add(template="python", start=environments_pb2.START_SPAWN, start_ms=80)
        broker.heartbeat(told)

    (first,) = make_report(broker).first_starts
    assert (first.template, first.count) == ("python", 2)
    assert (first.p50_ms, first.p95_ms) == (9_000, 12_000)
