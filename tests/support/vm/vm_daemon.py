"""A node's driver of microVMs in a process of its own, which tests kill at any line.

`python -m tests.support.vm.vm_daemon IMAGE SCRATCH TSC_KHZ [LINES]` answers each line of JSON on
its input with one. With LINES it kills itself before so many lines of the driver's code have run
after a command that begins with "!".
"""

import asyncio
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from etude.agent.workspace import ExecResult
from etude.envserver.drivers.base import Sandbox, SandboxError
from etude.envserver.drivers.vm.qemu import boot as qemu_boot
from etude.envserver.drivers.vm.qemu.command_line import QemuConfig
from etude.envserver.drivers.vm.qemu.driver import QemuDriver
from etude.envserver.drivers.vm.suspend.idle_policy import PowerState
from etude.envserver.images import built_image
from etude.envserver.storage.trees import File

TREE = {"README": File(b"read me\n"), "deep/er/notes.txt": File(b"one\n")}
LIMIT_S = 120
_OURS = f"{os.sep}drivers{os.sep}vm{os.sep}qemu{os.sep}"


async def nothing(command: str, timeout_s: float) -> ExecResult:
    raise AssertionError((command, timeout_s))


class Daemon:
    """Begins, finds and uses sandboxes by name."""

    def __init__(self, driver: QemuDriver) -> None:
        self.driver = driver
        self.sandboxes: dict[str, Sandbox] = {}
        self._calls: set[asyncio.Task[Any]] = set()

    async def begin(self, *names: str) -> list[str]:
        await asyncio.gather(*(self._begin(name) for name in names))
        return list(names)

    async def _begin(self, name: str) -> None:
        folder = self.driver.leases / name
        folder.mkdir(exist_ok=True)
        self.sandboxes[name] = self.driver.sandbox(folder, nothing, template="python")
        await self.sandboxes[name].initialize(TREE)

    async def find(self, *names: str) -> dict[str, str]:
        """What became of the leases of an earlier process."""
        return {name: self._find(name) for name in names}

    def _find(self, name: str) -> str:
        try:
            found = self.driver.sandbox(self.driver.leases / name, nothing, template="python")
        except SandboxError as error:
            return str(error)
        self.sandboxes[name] = found
        return "begun" if found.is_started else "not begun"

    async def run(self, name: str, command: str) -> str:
        return (await self.sandboxes[name].run(command, LIMIT_S)).output.decode()

    async def call(self, name: str, command: str) -> str:
        """Begin a command, and do not wait for it."""
        task = asyncio.create_task(self.run(name, command))
        self._calls.add(task)
        await asyncio.sleep(0.5)
        return "running" if not task.done() else "done"

    async def freeze(self, name: str) -> int:
        """Wait until it stands still, as every machine does that nobody calls."""
        guest = self.sandboxes[name]._guest  # type: ignore[attr-defined]
        while guest.state is not PowerState.FROZEN:  # noqa: ASYNC110 - there is no event for tests
            await asyncio.sleep(0.01)
        pid: int = guest.vm._in_memory.vm.pid
        return pid

    async def close(self, *names: str) -> int:
        for name in names:
            await self.sandboxes.pop(name).close()
        return _num_open()

    async def grow(self) -> bool:
        """Wait until machines can be split off; whether they can."""
        for keeper in self.driver.fork_servers._servers:
            keeper.ensure_started()
            if keeper._starting is not None:
                await keeper._starting
        return all(keeper.is_ready for keeper in self.driver.fork_servers._servers)

    async def sweep(self) -> int:
        return await self.driver._registry.sweep(least_age_s=0)


def _num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def kill_after(lines: int) -> None:
    """Count the lines of the driver's code in every thread, and end before the next one."""
    left = lines

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if _OURS not in frame.f_code.co_filename:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    threading.settrace(trace)
    sys.settrace(trace)


async def main() -> None:
    image, scratch, tsc_khz, *lines = sys.argv[1:]
    boots = 0
    boot = qemu_boot.boot

    async def counted(*arguments: Any, **named: Any) -> qemu_boot.BootingVm:
        nonlocal boots
        boots += 1
        return await boot(*arguments, **named)

    qemu_boot.boot = counted
    driver = QemuDriver(
        scratch=Path(scratch),
        images={"python": built_image.read_image(Path(image))},
        machine=QemuConfig(disk_mib=128, tsc_khz=int(tsc_khz)),
    )
    began_s = time.perf_counter()
    await driver.start()
    report = {"boots": boots, "start_s": time.perf_counter() - began_s}
    daemon = Daemon(driver)
    loop = asyncio.get_running_loop()
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        name, *arguments = json.loads(line)
        if name.startswith("!"):
            kill_after(int(lines[0]))
        answer = await getattr(daemon, name.removeprefix("!"))(*arguments)
        sys.settrace(None)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    await driver.stop()


if __name__ == "__main__":
    asyncio.run(main())
