"""Set-up of a task in a leased environment, before the first call of its agent."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from etude.common.errors import InvalidFieldError, WrongStateError, crossing
from etude.envserver import metrics
from etude.envserver.drivers.base import SandboxError
from etude.envserver.host.environment import LeasedEnvironment
from etude.envserver.host.leases import records
from etude.envserver.host.snapshots.environment_state import EnvironmentStates
from etude.envserver.host.workspace_change import (
    ChangeTooLargeError,
    list_setup_files,
    read_change,
)

MAX_COMMANDS = 64
MAX_COMMAND_CHARACTERS = 65_536
MAX_TIMEOUT_S = 3_600
OUTPUT_BYTES = 4_096


class SetupOutcome(NamedTuple):
    """Outcome of a set-up."""

    succeeded: int
    """Commands that succeeded; one that failed ended the set-up."""
    exit_code: int = 0
    output: bytes = b""
    """Tail of what the command that failed wrote."""
    timed_out: bool = False


async def set_up(
    states: EnvironmentStates,
    environment: LeasedEnvironment,
    commands: Sequence[str],
    *,
    timeout_s: float,
) -> SetupOutcome:
    """Run a task's commands in a lease of which nothing was used yet; it goes on without caller.

    A lease whose set-up failed takes no more calls. So does one whose host died in the middle: its
    workspace is there, and a set-up needs a lease without.

    Raises:
        InvalidFieldError: there are no commands, too many, or too long ones, or no time.
        WrongStateError: the lease was used.
        SandboxError: the platform failed.
    """
    _check(commands, timeout_s)

    async def work() -> SetupOutcome:
        environment.check_ready()
        if environment.is_used:
            raise WrongStateError(
                f"lease {environment.lease_id} was used: lease another environment to set it up"
            )
        with crossing(SandboxError, f"set-up of lease {environment.lease_id}"):
            await environment.make_workspace()
            done = await _run_commands(environment, commands, timeout_s)
            if done.succeeded == len(commands):
                try:
                    change = await read_change(
                        environment.sandbox, environment.source, environment.change_limits, {}
                    )
                except ChangeTooLargeError as error:
                    environment.close_for_calls()
                    what = f"the set-up leaves more than an agent may change: {error}"
                    return SetupOutcome(len(commands) - 1, output=what.encode())
                files = list_setup_files(change)
                record = replace(environment.record, is_prepared=True, setup_files=files)
                environment.replace_record(record)
                await asyncio.to_thread(records.save_record, environment.folder, record)
            else:
                environment.close_for_calls()
        return done

    started_s = time.monotonic()
    done = await states.between_turns(environment, work)
    metrics.setup_seconds.observe(time.monotonic() - started_s)
    return done


async def _run_commands(
    environment: LeasedEnvironment, commands: Sequence[str], timeout_s: float
) -> SetupOutcome:
    until_s = time.monotonic() + timeout_s
    for number, command in enumerate(commands):
        left_s = max(0.001, until_s - time.monotonic())
        outcome = await environment.sandbox.run(command, left_s)
        if outcome.exit_code or outcome.timed_out or outcome.ended_for:
            output = outcome.output[-OUTPUT_BYTES:]
            return SetupOutcome(number, outcome.exit_code, output, outcome.timed_out)
    return SetupOutcome(len(commands))


def _check(commands: Sequence[str], timeout_s: float) -> None:
    if not 1 <= len(commands) <= MAX_COMMANDS:
        raise InvalidFieldError("commands", f"must be 1 to {MAX_COMMANDS}")
    for number, command in enumerate(commands):
        if not 0 < len(command) <= MAX_COMMAND_CHARACTERS or "\0" in command:
            what = f"must have 1 to {MAX_COMMAND_CHARACTERS} characters and no NUL"
            raise InvalidFieldError(f"commands[{number}]", what)
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise InvalidFieldError("timeout_seconds", f"must be 1 to {MAX_TIMEOUT_S}")
