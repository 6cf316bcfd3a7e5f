"""What drivers of folders do with the state of their sandboxes, and what a hostile one tries."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from tests.support.environments.sandbox_states import CHECKS, LIMITS, States

from etude.envserver.drivers.base import Driver
from etude.envserver.drivers.in_memory import MemoryDriver
from etude.envserver.drivers.process.driver import ProcessDriver

Check = Callable[[States], Awaitable[None]]


@pytest.fixture(params=["memory", "process"])
async def states(
    request: pytest.FixtureRequest, driver: ProcessDriver, tmp_path: Path
) -> AsyncIterator[States]:
    drivers: dict[str, Driver] = {"process": driver, "memory": MemoryDriver(tmp_path / "leases")}
    await drivers[request.param].start()
    (tmp_path / "saved").mkdir(mode=0o700)
    made = States(drivers[request.param], "python", tmp_path / "saved")
    yield made
    await made.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_every_driver_keeps_the_contract(states: States, check: Check) -> None:
    await check(states)


HOSTILE = (
    "ln -s /etc/passwd link; ln -s / root; ln -s ../../.. up; ln -s nowhere broken;"
    " ln run.sh hard; mkfifo pipe; mkdir -p shut/in; echo x > shut/in/file; chmod 0 shut/in/file;"
    " chmod 0 shut; truncate -s 1T hole; printf end >> hole; chmod 777 README; touch -d @7 README"
)
LOOK = (
    "readlink link root up broken; test -p pipe && echo pipe; stat -c %a shut; chmod 700 shut;"
    " stat -c %a shut/in/file; chmod 600 shut/in/file; cat shut/in/file; stat -c %s hole;"
    " tail -c 3 hole; echo; stat -c '%a %Y' README; cat hard"
)


async def test_whatever_a_command_leaves_is_saved_without_being_followed(
    driver: ProcessDriver, tmp_path: Path
) -> None:
    states = States(driver, "python", tmp_path)
    sandbox = await states.begun("one")
    made = await sandbox.run(HOSTILE, 60)
    assert made.exit_code == 0, made.output
    (tmp_path / "s").mkdir()
    saved = await sandbox.save(tmp_path / "s", LIMITS)
    assert saved.num_bytes < 1 << 20
    other = states.new("other")

    await other.restore(tmp_path / "s", saved)

    seen = [await each.run(LOOK, 60) for each in (sandbox, other)]
    assert seen[0].output == seen[1].output
    assert seen[0].output.decode().split()[:4] == ["/etc/passwd", "/", "../../..", "nowhere"]


async def test_what_is_saved_cannot_be_reached_from_a_sandbox(
    driver: ProcessDriver, tmp_path: Path
) -> None:
    (tmp_path / "saved").mkdir(mode=0o700)
    states = States(driver, "python", tmp_path / "saved")
    sandbox = await states.begun("one")
    folder, _ = await states.saved(sandbox, "s")

    done = await sandbox.run(f"ls {folder}; echo x >> {folder}/workspace/README", 60)

    assert done.exit_code != 0
    assert (folder / "workspace" / "README").read_bytes() == b"read me\n"


async def test_what_runs_in_the_background_ends_with_a_rollback(
    driver: ProcessDriver, tmp_path: Path
) -> None:
    states = States(driver, "python", tmp_path)
    sandbox = await states.begun("one")
    (tmp_path / "s").mkdir()
    job = await sandbox.workspace.jobs.start("sleep 1000", timeout_s=None)
    saved = await sandbox.save(tmp_path / "s", LIMITS)
    assert (await sandbox.workspace.jobs.state(job)).is_running

    await sandbox.restore(tmp_path / "s", saved)

    found = await sandbox.workspace.jobs.state(job)
    assert (found.is_running, found.exit_code) == (False, 137)
    await states.close()
