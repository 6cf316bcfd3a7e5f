"""Programs of a controller in a guest, with either of the guest's agents."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.vm import guests

from etude.common.errors import WrongStateError
from etude.envserver.drivers import job_programs
from etude.envserver.drivers.job_programs import JobProgram
from etude.envserver.drivers.programs import Program, TerminalSize
from etude.envserver.guest.jobs import GuestJobs


@pytest.fixture(params=guests.AGENTS)
def agent(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextlib.asynccontextmanager
async def jobs(agent: str, folder: Path) -> AsyncIterator[GuestJobs]:
    (folder / "root").mkdir()
    async with guests.guest(agent, folder / "root") as guest:
        yield GuestJobs(channel=guest.channel)


def shell(line: str, **fields: object) -> Program:
    return Program(argv=("/bin/sh", "-c", line), **fields)  # type: ignore[arg-type] # its own


async def rest(program: JobProgram) -> bytes:
    return b"".join([piece.data async for piece in program.output()])


async def test_output_comes_while_it_runs_and_its_end_is_told(agent: str, tmp_path: Path) -> None:
    async with jobs(agent, tmp_path) as found:
        program = await job_programs.start_program(
            found, shell("echo one; read a; echo got $a; exit 3")
        )
        output = program.output()
        assert (await anext(output)).data == b"one\n"

        await program.write(b"word\n")

        assert b"".join([piece.data async for piece in output]) == b"got word\n"
        assert (await program.wait()).exit_code == 3
        await program.close()


async def test_input_of_any_length_arrives_and_ends(agent: str, tmp_path: Path) -> None:
    async with jobs(agent, tmp_path) as found:
        program = await job_programs.start_program(found, shell("sleep 0.2; wc -c"))

        await program.write(b"x" * 200_000)
        program.close_input()

        assert (await rest(program)).strip() == b"200000"
        await program.write(b"too late")
        await program.close()


async def test_folder_and_variables_are_the_controllers(agent: str, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "a b").mkdir()
    async with guests.guest(agent, tmp_path / "root") as guest:
        made = shell('echo "$COLOUR"; basename "$PWD"', cwd="a b", env={"COLOUR": "it's blue;"})

        program = await job_programs.start_program(GuestJobs(channel=guest.channel), made)

        assert await rest(program) == b"it's blue;\na b\n"
        await program.close()


async def test_it_ends_with_a_signal_with_its_time_and_with_its_client(
    agent: str, tmp_path: Path
) -> None:
    async with jobs(agent, tmp_path) as found:
        signalled, late, left = [
            await job_programs.start_program(found, shell("sleep 600", timeout_s=timeout_s))
            for timeout_s in (600, 1, 600)
        ]

        signalled.signal(15)
        await left.close()

        assert (await signalled.wait()).exit_code == 143
        assert (await late.wait()).ended_for == "time"
        assert not (await found.state(left.number)).is_running


async def test_a_program_that_ignores_the_first_signal_has_ended_when_its_client_has_left(
    agent: str, tmp_path: Path
) -> None:
    async with jobs(agent, tmp_path) as found:
        program = await job_programs.start_program(
            found, shell("trap '' TERM; echo ready; while :; do sleep 0.1; done", timeout_s=600)
        )
        assert (await anext(program.output())).data == b"ready\n"

        await program.close()

        state = await found.state(program.number)
        assert (state.is_running, state.exit_code) == (False, 137)


async def test_a_terminal_is_refused(agent: str, tmp_path: Path) -> None:
    async with jobs(agent, tmp_path) as found:
        with pytest.raises(WrongStateError, match="no terminals"):
            await job_programs.start_program(found, shell("true", terminal=TerminalSize(24, 80)))


async def test_many_run_beside_each_other(agent: str, tmp_path: Path) -> None:
    async with jobs(agent, tmp_path) as found:
        programs = [await job_programs.start_program(found, shell(f"echo {n}")) for n in range(6)]

        outputs = await asyncio.gather(*(rest(program) for program in programs))

        assert outputs == [f"{n}\n".encode() for n in range(6)]
