"""What a node asks a container before it claims any isolation."""

from pathlib import Path

import pytest

from etude.envserver.drivers.gvisor.driver import GvisorDriver
from etude.envserver.drivers.gvisor.isolation_probe import host_kernel, probe_isolation
from etude.envserver.drivers.gvisor.runsc import RunscError
from etude.envserver.guest.commands import GuestCommands


async def test_a_node_claims_isolation_only_where_kernel_and_files_are_not_its_own(
    driver: GvisorDriver, tmp_path: Path
) -> None:
    hidden = tmp_path / "hidden"
    hidden.touch()
    folder = driver.leases / "probed"
    folder.mkdir()
    container = await driver._begin("small", folder)
    try:
        await probe_isolation(container, hidden=hidden, kernel=host_kernel())
        with pytest.raises(RunscError, match="see /bin/sh, a file of this machine"):
            await probe_isolation(container, hidden=Path("/bin/sh"), kernel=host_kernel())
        with pytest.raises(RunscError, match="the kernel of this machine answers") as refused:
            await probe_isolation(container, hidden=hidden, kernel=await kernel_inside(driver))
        assert "4.4.0" in str(refused.value)
    finally:
        await container.destroy()


async def kernel_inside(driver: GvisorDriver) -> str:
    """Version of the kernel that containers here have."""
    folder = driver.leases / "asked"
    folder.mkdir()
    container = await driver._begin("small", folder)
    try:
        done = await GuestCommands(channel=container).run("cat /proc/version", 60)
        return done.output.decode().strip()
    finally:
        await container.destroy()
