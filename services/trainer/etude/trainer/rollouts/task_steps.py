"""Steps of a task: what each brings into the environment of a rollout, and what the rollout did.

The files of a step enter by calls of the policy's own toolset, so that a replacement of a lost
environment gets them again at their place among the policy's calls.
"""

import base64
import gzip
import io
import logging
import shlex
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from etude.agent.tool_calls import ToolCall
from etude.agent.turns import LaterSteps, to_json
from etude.common.blobs import Store
from etude.common.errors import CorruptError
from etude.common.harbor.task import MAX_FILE_BYTES, MAX_FILES, STEPS, WORKDIR
from etude.common.harbor.task_file import WORKSPACE, StepSection
from etude.trainer.rollouts.failover import FailoverEnvironment
from etude.trainer.rollouts.sandbox_client import MAX_DIFF_BYTES, ChangeTooLargeError
from etude.trainer.rollouts.task_setup import SetupFailedError
from etude.v1 import rollout_pb2

log = logging.getLogger(__name__)

MAX_ARCHIVE_BYTES = 1 << 20
"""Of the packed files of one step, which are sent as text."""
_PART_CHARACTERS = 60_000
"""Of one command: tools take 65,536."""
_TERMINAL = "run_terminal"
_DONE = "ready"
_PLACE = f"{WORKSPACE}/.etude-step"
"""Some drivers give each command a /tmp of its own."""
_LOG = "/tmp/etude-step.log"  # noqa: S108 - in the sandbox


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContent:
    """One step of a task, as a rollout needs it."""

    name: str
    instruction: str
    archive: bytes = b""
    """Packed files that enter the workspace before the step; empty if there are none."""
    has_setup: bool = False
    """True if setup.sh among them is then run."""


def read_steps(store: Store, steps: Sequence[StepSection]) -> tuple[StepContent, ...]:
    """Read the steps of a task from its folder; none of a task that is one piece of work.

    Raises:
        MissingError: a step has no instruction.
        StoreError: the store does not answer.
        CorruptError: a step's files are more than a step may bring, or no text.
    """
    return tuple(_read_step(store, step.name) for step in steps)


def _read_step(store: Store, name: str) -> StepContent:
    """Read one step.

    Raises:
        CorruptError: its files are more than a step may bring, or its instruction is no text.
    """
    folder = f"{STEPS}/{name}"
    try:
        instruction = store.get(f"{folder}/instruction.md").decode().strip()
    except UnicodeDecodeError as cause:
        raise CorruptError(f"{folder}/instruction.md is not UTF-8: {cause}") from cause
    files = dict[str, bytes]()
    for info in store.list(f"{folder}/{WORKDIR}/"):
        if info.size > MAX_FILE_BYTES or len(files) >= MAX_FILES:
            raise CorruptError(f"{info.key} exceeds {MAX_FILE_BYTES} bytes or {MAX_FILES} files")
        files[info.key.removeprefix(f"{folder}/{WORKDIR}/")] = store.get(info.key)
    archive = _pack(files) if files else b""
    if len(archive) > MAX_ARCHIVE_BYTES:
        what = f"has {len(archive)} bytes when packed, more than {MAX_ARCHIVE_BYTES}"
        raise CorruptError(f"{folder}/{WORKDIR} {what}")
    return StepContent(
        name=name, instruction=instruction, archive=archive, has_setup="setup.sh" in files
    )


def _pack(files: Mapping[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, data in sorted(files.items()):
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(data), 0o755 if path.endswith(".sh") else 0o644
            archive.addfile(member, io.BytesIO(data))
    return gzip.compress(packed.getvalue(), mtime=0)


def prepare_commands(step: StepContent) -> list[str]:
    """Shell commands that bring a step's files into the workspace; the last one says `ready`."""
    if not step.archive:
        return []
    text = base64.b64encode(step.archive).decode()
    parts = [text[at : at + _PART_CHARACTERS] for at in range(0, len(text), _PART_CHARACTERS)]
    sent = [f"rm -f {_PLACE}", *(f"printf %s {shlex.quote(p)} >> {_PLACE}" for p in parts)]
    setup = " && bash ./setup.sh" if step.has_setup else ""
    work = f"cd {WORKSPACE} && base64 -d {_PLACE} | tar -xzf -{setup}"
    # Only the last line tells how it ended: a tool shows no exit code, or one among the output.
    last = f"if ( {work} ) > {_LOG} 2>&1; then echo {_DONE}; else tail -c 500 {_LOG}; fi"
    return [*sent, f"{last}; rm -f {_PLACE} {_LOG}"]


@dataclass(slots=True)
class StepProgress(LaterSteps):
    """Steps of one rollout, each started when the policy ends the one before."""

    steps: Sequence[StepContent]
    environment: FailoverEnvironment
    done: list[rollout_pb2.RolloutStep] = field(default_factory=list)
    """Steps that have ended, with the changes up to their ends."""

    @property
    @override
    def is_last(self) -> bool:
        return len(self.done) + 1 >= len(self.steps)

    async def begin_first(self) -> None:
        """Prepare the environment for the first step.

        Raises:
            SetupFailedError: its files cannot be brought in, by the task's own fault.
        """
        if self.steps and (why := await self._prepare(self.steps[0])):
            raise SetupFailedError(f"step {self.steps[0].name} of the task: {why}")

    @override
    async def begin_next(self) -> str | None:
        number = len(self.done)
        try:
            diff = await self.environment.diff_of_step(number)
        except ChangeTooLargeError as error:
            log.info("the rollout ends with step %s: %s", self.steps[number].name, error)
            return None  # its end is refused for the same reason
        self.done.append(rollout_pb2.RolloutStep(name=self.steps[number].name, diff=diff))
        step = self.steps[number + 1]
        if why := await self._prepare(step):
            # What the policy left may be the reason: a mask would reward that.
            log.warning("step %s of the task cannot begin: %s", step.name, why)
            self.done.pop()
            return None
        return step.instruction

    async def _prepare(self, step: StepContent) -> str:
        """Bring the files of a step in; returns the reason if that fails."""
        commands = prepare_commands(step)
        for number, command in enumerate(commands):
            call = ToolCall(f"{step.name}/{number}", _TERMINAL, to_json({"command": command}))
            (outcome,) = await self.environment.run([call])
            is_end = number + 1 == len(commands)
            if outcome.is_error or (is_end and outcome.content.strip() != _DONE):
                return outcome.content.strip()[-500:] or "its files cannot be brought in"
        return ""

    def records(self) -> list[rollout_pb2.RolloutStep]:
        """The steps that were started, for the rollout's record; none of a task of one piece."""
        if not self.steps:
            return []
        return [*self.done, rollout_pb2.RolloutStep(name=self.steps[len(self.done)].name)]


def check_changes(rollout: rollout_pb2.Rollout) -> None:
    """Check that the changes of all steps together can be scored.

    Raises:
        ChangeTooLargeError: they are too large.
    """
    if len(rollout.diff) + sum(len(step.diff) for step in rollout.steps) > MAX_DIFF_BYTES:
        raise ChangeTooLargeError(f"the changes of all steps have more than {MAX_DIFF_BYTES} bytes")
