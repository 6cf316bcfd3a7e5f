"""What commands in a microVM reach through their proxy, across everything that befalls it."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.environments.upstreams import World
from tests.support.vm import guests, microvms
from tests.support.vm.daemons import Daemon

from etude.agent.workspace import ExecResult
from etude.common.pools.pool_description import PoolDescription, parse_description
from etude.envserver.drivers.base import Sandbox, Verification
from etude.envserver.drivers.vm.qemu.driver import QemuDriver
from etude.envserver.host.pool_following import PoolFollower
from etude.envserver.images.built_image import BuiltImage
from etude.envserver.storage import folders
from etude.envserver.storage.trees import File

LONG_S = 120.0
RULES: Mapping[str, object] = {
    "egress": "Custom",
    "rules": [
        {"name": "shop", "host": "shop.example.com", "port": 80, "mode": "Http"},
        {"name": "metadata", "host": "metadata.example.com", "port": 80, "mode": "Http"},
    ],
}
ASK = b"""printf 'GET %s HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n' "$1" | nc 127.0.0.1 3128 2>&1"""
"""Busybox's own wget crashes where it has a proxy: it was linked without what looks names up."""
FETCH = "sh ask http://shop.example.com/hello | tail -n 1"
HELLO = "hello from the shop\n"
HELD = "( printf 'GET http://shop.example.com/ HTTP/1.1\\r\\n'; sleep 600 ) | nc 127.0.0.1 3128"
"""A connection that stays open: its request has no end."""
POSTED = (
    "( printf 'POST http://shop.example.com/upload HTTP/1.1\\r\\nHost: a\\r\\n'"
    "; printf 'Content-Length: 9\\r\\n\\r\\n'; sleep 600 ) | nc 127.0.0.1 3128"
)
"""A request that a rule allows, whose body never comes."""
GONE = "for i in $(seq 200); do pidof nc > /dev/null || { echo gone; break; }; sleep 0.1; done"


@pytest.fixture(scope="module")
def started(image: BuiltImage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[QemuDriver]:
    made = QemuDriver(
        scratch=tmp_path_factory.mktemp("driver"),
        images={"t": image, "closed": image},
        machine=microvms.small_machine(),
    )
    asyncio.run(made.start())
    for address, starter in made._starters.items():
        made._starters[address] = replace(starter, spawner=None)
    yield made
    asyncio.run(made.stop())


@pytest.fixture
def driver(started: QemuDriver, world: World) -> Iterator[QemuDriver]:
    started.egress = world.egress(RULES, t=None, closed=())
    yield started
    for folder in started.leases.iterdir():
        folders.remove_folder(folder)


async def nothing(command: str, timeout_s: float) -> ExecResult:
    raise AssertionError((command, timeout_s))


def made(driver: QemuDriver, name: str, template: str = "t") -> Sandbox:
    folder = driver.leases / name
    folder.mkdir()
    return driver.sandbox(folder, nothing, template=template)


async def begun(driver: QemuDriver, name: str, template: str = "t") -> Sandbox:
    found = made(driver, name, template)
    await found.initialize({"ask": File(ASK)})
    return found


async def sh(sandbox: Sandbox, command: str) -> str:
    return (await sandbox.run(command, LONG_S)).output.decode()


async def test_a_listed_host_is_reached_and_nothing_else(driver: QemuDriver, world: World) -> None:
    sandbox = await begun(driver, "a")

    assert await sh(sandbox, FETCH) == HELLO
    for host in ("evil.example.net", "169.254.169.254", "metadata.example.com"):
        assert " 403 " in await sh(sandbox, f"sh ask http://{host}/")
    assert len(world.seen) == 1
    await sandbox.close()


@pytest.mark.long
async def test_megabytes_go_through(driver: QemuDriver) -> None:
    sandbox = await begun(driver, "a")

    said = await sh(sandbox, "sh ask 'http://shop.example.com/big?3145728' | wc -c")

    assert int(said) > 3145728
    await sandbox.close()


async def test_a_rule_that_leaves_the_pools_spec_cuts_what_a_guest_has_open(
    driver: QemuDriver, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    sandbox = await begun(driver, "a")
    follower = PoolFollower(described(RULES), driver)
    job = await sandbox.workspace.jobs.start(POSTED, timeout_s=None)
    await guests.until(lambda: world.num_opened == 1)

    rules = [rule for rule in RULES["rules"] if rule["name"] != "shop"]  # type: ignore[attr-defined]
    with caplog.at_level("INFO"):
        follower.apply(described({**RULES, "rules": rules}))
        await guests.until(lambda: "its rule was revoked" in caplog.text)

    assert "1 connections were cut" in caplog.text
    assert not follower.needs_restart
    assert await sh(sandbox, GONE) == "gone\n"
    assert " 403 " in await sh(sandbox, "sh ask http://shop.example.com/hello")
    await sandbox.workspace.jobs.kill(job)
    await sandbox.close()


def described(network: Mapping[str, object]) -> PoolDescription:
    spec = {"templates": [{"name": "t"}, {"name": "closed"}], "network": network}
    return parse_description(json.dumps({"name": "p", "uid": "u", "spec": spec}), "a test")


async def test_a_template_without_rules_and_a_verifier_have_no_way_out(
    driver: QemuDriver, world: World
) -> None:
    sandbox = await begun(driver, "a", "closed")
    fetch = f"env | grep -ci proxy; {FETCH}"
    work = Verification(
        template="t",
        workspace={"ask": File(ASK)},
        tests={},
        command=fetch,
        timeout_s=60,
        reward_path="/logs/r",
    )

    said = [await sh(sandbox, fetch), (await driver.verify(work)).output.decode()]

    assert all(each.startswith("0\n") and "refused" in each for each in said)
    assert world.seen == []
    await sandbox.close()


async def test_connections_end_with_a_pause_and_the_way_out_comes_back(
    driver: QemuDriver, world: World
) -> None:
    sandbox = await begun(driver, "a")
    job = await sandbox.workspace.jobs.start(HELD, timeout_s=None)
    assert await sh(sandbox, FETCH) == HELLO

    await sandbox.pause()
    await sandbox.resume()

    # What was open there is closed: nc has ended, and with it the job's output.
    assert await sh(sandbox, FETCH) == HELLO
    assert await sh(sandbox, GONE) == "gone\n"
    await sandbox.workspace.jobs.kill(job)
    await sandbox.close()


async def test_a_fork_has_a_way_out_of_its_own(
    driver: QemuDriver, world: World, tmp_path: Path
) -> None:
    source = await begun(driver, "a")
    assert await sh(source, FETCH) == HELLO
    (tmp_path / "saved").mkdir()
    saved = await source.save(tmp_path / "saved", folders.DIFF)
    fork = made(driver, "b")
    await fork.restore(tmp_path / "saved", saved)

    both = await asyncio.gather(sh(source, FETCH), sh(fork, FETCH))

    assert list(both) == [HELLO, HELLO]
    for sandbox in (source, fork):
        await sandbox.close()
    assert len(world.seen) == 3


async def test_closing_the_sandbox_ends_its_connections(
    driver: QemuDriver, caplog: pytest.LogCaptureFixture
) -> None:
    sandbox = await begun(driver, "a")
    await sandbox.workspace.jobs.start(HELD, timeout_s=None)
    assert await sh(sandbox, FETCH) == HELLO
    with caplog.at_level("INFO"):
        await sandbox.close()
        await guests.until(lambda: "verdict=malformed" in caplog.text)


@pytest.mark.long
async def test_the_way_out_is_there_after_the_hosts_death(
    image: BuiltImage, world: World, tmp_path: Path
) -> None:
    machine = microvms.small_machine()
    first = Daemon(image, tmp_path / "scratch", tsc_khz=machine.tsc_khz, lines=0)
    assert first.ask("begin", "a") == ["a"]
    first.kill()

    second = QemuDriver(
        scratch=tmp_path / "scratch",
        images={"python": image},
        machine=machine,
        egress=world.egress(RULES, python=None),
    )
    await second.start()
    found = second.sandbox(second.leases / "a", nothing, template="python")
    await found.workspace.write("ask", ASK)
    assert await sh(found, FETCH) == HELLO
    await found.close()
    await second.stop()
