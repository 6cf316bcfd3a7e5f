"""Set-up of a task in a leased environment: its commands, and the error if one fails."""

import math
from dataclasses import dataclass
from typing import Self

from etude.common.errors import EtudeError
from etude.common.harbor.task_file import MetadataSection
from etude.trainer.rollouts.snapshot_client import SnapshotClient

_OUTPUT_CHARACTERS = 500


class SetupFailedError(EtudeError):
    """A command of a task's set-up fails: the task is at fault, and its rollouts are masked."""

    reason = "SetupFailed"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSetup:
    """Commands that prepare a task's workspace before its agent starts."""

    commands: tuple[str, ...] = ()
    timeout_s: float = 600.0
    """Time limit of all commands together."""

    @classmethod
    def of_task(cls, metadata: MetadataSection) -> Self:
        return cls(commands=metadata.etude_setup, timeout_s=metadata.etude_setup_timeout_sec)

    async def run(self, client: SnapshotClient) -> None:
        """Run the commands in a lease that was not used, if there are any.

        Raises:
            SetupFailedError: a command failed.
            AioRpcError: the host refuses, or went away in the middle: the lease is of no use.
        """
        if not self.commands:
            return
        done = await client.set_up(self.commands, limit_s=math.ceil(self.timeout_s))
        if done.succeeded == len(self.commands):
            return
        why = f"did not end within {self.timeout_s:g} s" if done.timed_out else ""
        tail = done.output[-_OUTPUT_CHARACTERS:].decode(errors="replace").strip()
        raise SetupFailedError(
            f"metadata.etude_setup[{done.succeeded}] of the task"
            f" {why or f'ended with exit code {done.exit_code}'}: {tail!r}"
        )
