"""Grading with hidden tests in a guest: a fresh one, or a fork of the agent's.

A fork is cleaned first. Covered: every process of the agent's user has ended, and no new one can
start, since no remaining user may become that user; the workspace is the initial files and the
artefacts, as in a fresh guest; files that the agent left in shared folders are gone, the home of
commands included; the tests belong to root, so that what they start cannot change them. Not
covered: what the agent had a service do by a request. That is what a fork is graded for, and why
its grade is weaker evidence.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace

from etude.agent.workspace import ExecResult, PathFault, WorkspaceError
from etude.agent.workspace.interface import HOME
from etude.envserver.drivers.base import (
    GRADE_OUTPUT_BYTES,
    CommandOutcome,
    SandboxError,
    SandboxStart,
    Verification,
)
from etude.envserver.guest.calls import GuestCaller
from etude.envserver.guest.commands import CommandSettings, GuestCommands
from etude.envserver.guest.workspace import GuestWorkspace
from etude.envserver.guest.workspace_files import write_tree
from etude.envserver.isolation import sandbox_layout
from etude.envserver.isolation.sandbox_layout import INSIDE_UID, LOGS, TESTS

ROOT_UID = 0
_END_LIMIT_S, _CLEAR_LIMIT_S = 30.0, 120.0
_ENDS = 5
"""Attempts: a process in uninterruptible sleep dies only after it."""
_KILL = "kill -9 -1"
"""Run as the agent's user: reaches all of its processes at once but the caller, so that none can
escape from a list by forking."""
_LEFT = f"""for status in /proc/[0-9]*/status; do
  while read -r key real effective _; do
    case $key in
      State:) [ "$real" = Z ] && break ;;
      Uid:)
        case "$real $effective" in "{INSIDE_UID} "* | *" {INSIDE_UID}") echo "$status" ;; esac
        break ;;
    esac
  done < "$status"
done 2>/dev/null; true"""
_SHARED = "/tmp /var/tmp /dev/shm /run"  # noqa: S108 - the guest's
_CLEAR = f"""set -e
rm -rf {TESTS} {LOGS}
find {HOME} -xdev -mindepth 1 -maxdepth 1 -exec rm -rf {{}} +
for folder in {_SHARED}; do
  [ -d "$folder" ] || continue
  find "$folder" -xdev -mindepth 1 -user {INSIDE_UID} -prune -exec rm -rf {{}} +
done
mkdir -m 755 {TESTS}
mkdir -m 755 {LOGS}
chown {INSIDE_UID}:{INSIDE_UID} {LOGS}"""


async def grade_fresh(
    channel: GuestCaller, work: Verification, how: CommandSettings
) -> CommandOutcome:
    """Grade in a guest that no agent has run in: a fresh one, or one with what a set-up left."""
    await write_tree(channel, work.workspace, root=HOME, deleted=work.deleted)
    await write_tree(channel, work.tests, root=TESTS)
    return await _grade(channel, work, how)


async def grade_new(
    channel: GuestCaller,
    work: Verification,
    how: CommandSettings,
    *,
    start: SandboxStart,
    destroy: Callable[[], Awaitable[None]],
) -> CommandOutcome:
    """Grade in a fresh guest that was started for this, and destroy it."""
    try:
        return replace(await grade_fresh(channel, work, how), sandbox_start=start)
    finally:
        await destroy()


async def grade_fork(
    channel: GuestCaller, work: Verification, how: CommandSettings
) -> CommandOutcome:
    """Grade in a fork of the agent's guest.

    Raises:
        SandboxError: it could not be cleaned.
    """
    await _end_agents_processes(channel)
    await _as_root(channel, _CLEAR, _CLEAR_LIMIT_S, what="cleared of what the agent left")
    await write_tree(channel, work.workspace, root=HOME)
    await write_tree(channel, work.tests, root=TESTS, uid=ROOT_UID)
    return await _grade(channel, work, how)


async def _end_agents_processes(channel: GuestCaller) -> None:
    agents = GuestCommands(channel=channel, uid=INSIDE_UID)
    left = ""
    for _ in range(_ENDS):
        await agents.run(_KILL, _END_LIMIT_S)
        left = await _as_root(channel, _LEFT, _END_LIMIT_S, what="searched for processes")
        if not left:
            return
    raise SandboxError(f"processes of the agent do not end: {left[:200]}")


async def _as_root(channel: GuestCaller, script: str, limit_s: float, *, what: str) -> str:
    """Run a script as root and return its output.

    Raises:
        SandboxError: it failed.
    """
    done = await GuestCommands(channel=channel, uid=ROOT_UID).run(script, limit_s)
    said = done.output.decode(errors="replace").strip()
    if done.exit_code != 0 or done.ended_for:
        raise SandboxError(f"the fork could not be {what}: {done.ended_for or said[-200:]}")
    return said


async def _grade(channel: GuestCaller, work: Verification, how: CommandSettings) -> CommandOutcome:
    commands = GuestCommands(
        channel=channel,
        environment={**how.environment, **work.environment},
        limits=how.limits,
        head_bytes=0,
        tail_bytes=GRADE_OUTPUT_BYTES,
    )
    done = await commands.run(work.command, work.timeout_s)
    logs = GuestWorkspace(channel, commands.run, cwd=LOGS)
    return to_outcome(done, await _collect(logs, work.reward_path))


async def _collect(logs: GuestWorkspace, path: str) -> bytes | None:
    """Read a regular, small file below /logs; None where there is none.

    Raises:
        WorkspaceError: the read failed for a reason other than the file.
    """
    try:
        data = await logs.read(path.removeprefix(f"{LOGS}/"))
    except WorkspaceError as error:
        if error.fault in {PathFault.NO_SPACE, PathFault.TOO_SLOW}:
            raise
        return None
    return data if len(data) <= sandbox_layout.MAX_COLLECTED_BYTES else None


def to_outcome(done: ExecResult, collected: bytes | None = None) -> CommandOutcome:
    """Convert an agent's result to an outcome."""
    return CommandOutcome(
        output=done.output,
        exit_code=done.exit_code,
        timed_out=done.timed_out,
        ended_for=done.ended_for,
        dropped_bytes=done.dropped_bytes,
        dropped_lines=done.dropped_lines,
        cpu_ms=done.cpu_ms,
        collected=collected,
    )
