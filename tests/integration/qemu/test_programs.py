"""A controller's programs in a microVM."""

from pathlib import Path

import pytest
from tests.support.vm import microvms

from etude.agent.workspace import ExecResult
from etude.common.errors import WrongStateError
from etude.envserver.drivers.programs import Program, TerminalSize
from etude.envserver.drivers.vm.qemu.driver import QemuDriver
from etude.envserver.images.built_image import BuiltImage
from etude.envserver.storage.trees import File


async def nothing(command: str, timeout_s: float) -> ExecResult:
    raise AssertionError((command, timeout_s))


async def test_a_program_in_a_vm_is_talked_to_while_it_runs(
    image: BuiltImage, tmp_path: Path
) -> None:
    driver = QemuDriver(scratch=tmp_path, images={"small": image}, machine=microvms.small_machine())
    await driver.start()
    try:
        folder = driver.leases / "a"
        folder.mkdir()
        sandbox = driver.sandbox(folder, nothing, template="small")
        await sandbox.initialize({"notes.txt": File(b"first\n")})
        shell = "cat notes.txt; read word; echo got $word; echo $word > made; exit 3"

        program = await sandbox.start(Program(argv=("/bin/sh", "-c", shell)))
        output = program.output()
        assert (await anext(output)).data == b"first\n"
        await program.write(b"hello\n")
        said = b"".join([piece.data async for piece in output])
        ending = await program.wait()
        await program.close()

        assert (said, ending.exit_code) == (b"got hello\n", 3)
        assert await sandbox.workspace.read("made") == b"hello\n"
        with pytest.raises(WrongStateError):
            await sandbox.start(Program(argv=("sh",), terminal=TerminalSize(24, 80)))
        await sandbox.close()
    finally:
        await driver.stop()
