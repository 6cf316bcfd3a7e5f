"""Migration of a paused VM's state out of a VMM and into one."""

import asyncio
import os

from etude.envserver.drivers.vm import sealed_files
from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.qemu.qmp import Event, QmpClient, pass_file
from etude.envserver.drivers.vm.qemu.vm import QemuVm

LIMIT_S = 120.0
"""A full stream of a large machine on a busy host; device states take milliseconds."""
_UNLIMITED = 1 << 40
"""Bytes per second; QEMU's default is 128 MiB."""
_NAME = "state"
_FINISHING = "finish-migrate"
_SETTLING_S = 0.001
_MAX_DEVICE_BYTES = 4 << 20
"""200 times the usual size. A compromised VMM may write anything."""


async def send(vm: QemuVm, target: int, *, leaves_memory: bool) -> None:
    """Write the state of a paused VM to a file."""
    ended = vm.qmp.expect(_is_end)
    try:
        await vm.qmp.execute("migrate-set-capabilities", _capabilities(leaves_memory=leaves_memory))
        await vm.qmp.execute("migrate-set-parameters", {"max-bandwidth": _UNLIMITED})
        await vm.qmp.execute("getfd", {"fdname": _NAME}, descriptors=(target,))
        await vm.qmp.execute("migrate", {"uri": f"fd:{_NAME}"})
        await _wait_completed(ended)
        await wait_until_settled(vm.qmp)
    except VmmError as error:
        raise await vm.with_last_output(error) from error
    finally:
        ended.cancel()


async def receive(vm: QemuVm, source: int, *, has_memory: bool) -> None:
    """Load a state into a waiting VMM; the VM ends paused, always.

    Args:
        vm: an idle VMM.
        source: descriptor of a file, at the start of the state.
        has_memory: whether the state contains all of the guest's memory.

    Raises:
        VmmError: the state was refused, and the VMM is gone.
    """
    ended = vm.qmp.expect(_is_end)
    try:
        # Sent together and done in order: four round trips less on the hot path.
        await asyncio.gather(
            vm.qmp.execute("migrate-set-capabilities", _capabilities(leaves_memory=not has_memory)),
            vm.qmp.execute("getfd", {"fdname": _NAME}, descriptors=(source,)),
            vm.qmp.execute("migrate-incoming", {"uri": f"fd:{_NAME}"}),
            _wait_completed(ended),
        )
        await _check_paused(vm.qmp)
    except VmmError as error:
        raise await vm.with_last_output(error) from error
    finally:
        ended.cancel()


async def device_state(vm: QemuVm) -> "DeviceState":
    """Prepare the VMM to write its device state, which then takes one command."""
    file = sealed_files.create("device-state")
    writer = os.open(f"/proc/self/fd/{file}", os.O_WRONLY | os.O_CLOEXEC)
    try:
        handed = await pass_file(vm.qmp, writer)
    except BaseException:
        os.close(file)
        raise
    finally:
        os.close(writer)
    return DeviceState(vm.qmp, file, handed.fdset)


class DeviceState:
    """File for the state of a VM's devices, without the memory."""

    def __init__(self, qmp: QmpClient, file: int, number: int) -> None:
        self._qmp, self._file, self._number = qmp, file, number

    async def save(self) -> None:
        # "live" would hand the disks over to another VMM, and a later migration of this one would
        # fail an assertion. The command does nothing specific to Xen.
        arguments = {"filename": f"/dev/fdset/{self._number}", "live": False}
        await self._qmp.execute("xen-save-devices-state", arguments)

    def content(self) -> bytes:
        """Read the written state.

        Raises:
            VmmError: it is too large for our few devices.
        """
        if (size := os.fstat(self._file).st_size) > _MAX_DEVICE_BYTES:
            raise VmmError(f"the device state has {size} bytes")
        return sealed_files.read_all(self._file)

    async def close(self) -> None:
        os.close(self._file)
        await self._qmp.execute("remove-fd", {"fdset-id": self._number})


def _is_end(event: Event) -> bool:
    return event.get("event") == "MIGRATION" and _status(event) in {"completed", "failed"}


def _status(event: Event) -> str | None:
    data = event.get("data")
    status = data.get("status") if isinstance(data, dict) else None
    return status if isinstance(status, str) else None


async def _wait_completed(ended: "asyncio.Future[Event]") -> None:
    try:
        async with asyncio.timeout(LIMIT_S):
            event = await ended
    except TimeoutError as cause:
        raise VmmError(f"the state was not migrated in {LIMIT_S:g} s") from cause
    if _status(event) != "completed":
        raise VmmError("the VMM failed to migrate its state")


async def wait_until_settled(qmp: QmpClient) -> None:
    """Wait until a VMM that has written a state allows its VM to continue.

    It reports completion a moment before, and refuses `cont` until then.

    Raises:
        VmmError: the connection ended, or the limit was reached.
    """
    try:
        async with asyncio.timeout(LIMIT_S):
            while await _run_state(qmp) == _FINISHING:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(_SETTLING_S)
    except TimeoutError as cause:
        raise VmmError(f"the VMM was not done in {LIMIT_S:g} s") from cause


async def _check_paused(qmp: QmpClient) -> None:
    found = await _run_state(qmp)
    if found != "paused":
        raise VmmError(f"a restored VM is {str(found)[:100]} instead of paused")


async def _run_state(qmp: QmpClient) -> object:
    """Ask the VMM for its VM's run state; a compromised one may answer anything."""
    answer = await qmp.execute("query-status")
    return answer.get("status") if isinstance(answer, dict) else answer


def _capabilities(*, leaves_memory: bool) -> dict[str, object]:
    wanted = {"x-ignore-shared": leaves_memory, "events": True}
    states = [{"capability": name, "state": state} for name, state in wanted.items()]
    return {"capabilities": states}
