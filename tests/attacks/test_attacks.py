"""Every attack on every driver: it reaches nothing, and nobody else is harmed."""

import pytest
from tests.attacks.arena import REACHED, Arena
from tests.attacks.conftest import Account
from tests.attacks.deeds import DEEDS
from tests.attacks.proxied import PROXY
from tests.attacks.scripts import KERNEL, NEEDS, NETWORK, RESOURCES

SCRIPTS = {**RESOURCES, **KERNEL, **NETWORK, **PROXY}

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("name", SCRIPTS)
async def test_a_command_reaches_nothing(arena: Arena, account: Account, name: str) -> None:
    await can_be_tried(arena, name)
    said = await arena.sh(SCRIPTS[name])
    await settle(arena, account, name, said[-300:] if REACHED in said else "")


@pytest.mark.parametrize("name", DEEDS)
async def test_a_deed_reaches_nothing(arena: Arena, account: Account, name: str) -> None:
    await can_be_tried(arena, name)
    await settle(arena, account, name, await DEEDS[name](arena))


async def can_be_tried(arena: Arena, name: str) -> None:
    if name in PROXY and arena.processes.network["egress"] == "None":
        pytest.skip(f"environments of driver {arena.lease.driver} have no way out to attack")
    program = NEEDS.get(name, "sh")
    if program not in await arena.sh(f"command -v {program}"):
        pytest.skip(f"there is no {program} in environments of driver {arena.lease.driver} here")


async def settle(arena: Arena, account: Account, name: str, reached: str) -> None:
    """Enter what was reached, and what was harmed whether or not the attack noticed."""
    found = reached or await arena.harm()
    account.reached[f"{arena.lease.driver}: {name}"] = found
    assert not found, found
