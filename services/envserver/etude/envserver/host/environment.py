"""One leased environment: its workspace, its calls, its results."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from etude.agent import messages
from etude.agent.search.codebase import Codebase
from etude.agent.tool_calls import MalformedCall, ParsedCall, call_from_json
from etude.agent.tools.base import Access
from etude.agent.toolsets import Toolset, run_calls
from etude.agent.workspace import ExecResult
from etude.common.errors import (
    ForbiddenError,
    InvalidFieldError,
    UnavailableError,
    UnknownIdError,
    WrongStateError,
    crossing,
)
from etude.envserver.drivers.base import CommandOutcome, Driver, Sandbox, SandboxError
from etude.envserver.drivers.programs import Program, RunningProgram
from etude.envserver.host import workspace_change
from etude.envserver.host.access_history import AccessHistory
from etude.envserver.host.controller_access import ControllerPrograms
from etude.envserver.host.leases import call_results
from etude.envserver.host.leases.call_results import CallResults, Digests, KnownIds
from etude.envserver.host.leases.lease_fields import is_same_token
from etude.envserver.host.leases.preemption import refuse_preempted
from etude.envserver.host.leases.records import CALLS, CallHistory, CallLog, LeaseRecord
from etude.envserver.host.result_cache import ResultCache
from etude.envserver.host.workspace_sources import WorkspaceSource
from etude.envserver.storage import folders, trees
from etude.envserver.storage.folders import FolderLimits
from etude.v1 import environments_pb2

log = logging.getLogger(__name__)

MAX_CALLS = 256

_CHANGES = frozenset({Access.WRITE, Access.ALL})


@dataclass(slots=True)
class LeasedEnvironment:
    """One lease: its sandbox, its calls and their results, changed by one turn at a time."""

    record: LeaseRecord
    source: WorkspaceSource
    toolset: Toolset
    folder: Path
    """The lease's own folder."""
    driver: Driver
    cache: ResultCache
    deadline_s: float
    """On the monotonic clock."""
    change_limits: FolderLimits = folders.DIFF
    """Limits on what its calls may change."""
    is_paused: bool = False
    """True while it is saved on disk: nothing can be done with it before it is resumed."""
    is_half_restored: bool = False
    """True after a failed rollback: only another rollback is possible."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock that every change holds."""
    _sandbox: Sandbox = field(init=False)
    _log: CallLog = field(init=False)
    _codebase: Codebase = field(init=False)
    _results: CallResults = field(default_factory=CallResults)
    _accesses: AccessHistory = field(default_factory=AccessHistory)
    _identity: str | None = None
    """Identity of the workspace if known; empty if it cannot be computed."""
    _running: set[asyncio.Task[list[environments_pb2.ToolResult]]] = field(default_factory=set)
    _programs: ControllerPrograms = field(default_factory=ControllerPrograms)
    _num_visits: int = 0
    """Count of changes from outside."""
    _closed: bool = False

    def __post_init__(self) -> None:
        self._sandbox = self.driver.sandbox(self.folder, self._exec, template=self.record.template)
        self._log = CallLog(self.folder / CALLS)
        self._codebase = self.source.open_codebase()

    @property
    def lease_id(self) -> str:
        return self.record.lease_id

    @property
    def is_used(self) -> bool:
        """True once the workspace was made."""
        return self._sandbox.is_started

    @property
    def is_lost(self) -> bool:
        """True if its sandbox ended before it did."""
        return not self._sandbox.is_intact

    @property
    def sandbox(self) -> Sandbox:
        """The driver's sandbox; used while the turn is held."""
        return self._sandbox

    @property
    def results(self) -> CallResults:
        """Results of its calls; used while the turn is held."""
        return self._results

    @property
    def can_pause(self) -> bool:
        """True if a pause takes nothing from it: what runs is in a memory that is saved."""
        return not self._programs and (self.driver.caps.memory or not self._has_jobs())

    def check_open(self) -> None:
        """Check that the lease has not ended.

        Raises:
            UnknownIdError: the lease has ended.
        """
        if self._closed:
            raise self._lease_ended_error()

    def check_ready(self) -> None:
        """Check that the sandbox runs.

        Raises:
            WrongStateError: it is paused, or half rolled back.
            PreemptedError: it waits for a slot.
        """
        self.check_open()
        refuse_preempted(self.record.held)
        if self.is_paused:
            raise WrongStateError(f"lease {self.lease_id} is paused: resume it first")
        if self.is_half_restored:
            raise WrongStateError(f"lease {self.lease_id} is half rolled back: roll it back again")

    def replace_record(self, record: LeaseRecord) -> None:
        """Replace the record after a change of the files from outside; the turn is held."""
        self.record, self._identity = record, None

    def close_for_calls(self) -> None:
        """Refuse all later calls; the turn is held."""
        self._closed = True

    async def make_workspace(self) -> None:
        """Write the first files, unless done; the turn is held."""
        if not self.is_used:
            await self._sandbox.initialize(self.source.tree)
            self._identity = self.source.key if self.source.base is None else None

    def replace_history(self, found: CallHistory) -> None:
        """Replace the results by those of this history; the call log holds it already."""
        self._log.close()
        self._results = CallResults()
        self._results.add(list(found.results.values()), found.digests)
        self._codebase, self._identity = self.source.open_codebase(), None

    def check_agent(self, token: str) -> None:
        """Check for the agent's or the control token.

        Raises:
            ForbiddenError: neither token.
        """
        lease = self.record.held.lease
        if not is_same_token(token, lease.agent_token, lease.control_token):
            raise ForbiddenError(f"lease {self.lease_id}: the token does not allow tool calls")

    def check_control(self, token: str) -> None:
        """Check for the control token.

        Raises:
            ForbiddenError: another token, the agent's included.
        """
        if not is_same_token(token, self.record.held.lease.control_token):
            raise ForbiddenError(f"lease {self.lease_id}: this takes the control token")

    async def take_over(self, found: CallHistory) -> bool:
        """Continue where an earlier process stopped.

        Returns:
            False if a turn was cut off and left a trace, or a background command was.
        """
        if not self._sandbox.is_intact:
            return False
        if found.before is not None and (await self._workspace_identity() or None) != found.before:
            return False
        self._results.add(list(found.results.values()), found.digests)
        self._accesses.is_complete = False
        return True

    async def run_turn(
        self, calls: Sequence[environments_pb2.ToolCall], known: KnownIds = None
    ) -> list[environments_pb2.ToolResult]:
        """Results in call order; a call that has a result already is not run again.

        Raises:
            WrongStateError: a call ran that is not among those known.
            InvalidFieldError: a call without an id, or two with the same.
            ReusedIdError: an id came with another call before.
            UnknownIdError: the lease ended meanwhile.
            CancelledError: the caller is gone; the turn goes on.
        """
        digests = {call.call_id: call_results.call_digest(call) for call in calls}
        if len(digests) < len(calls) or "" in digests:
            raise InvalidFieldError("calls", "each call needs an id of its own")
        if len(calls) > MAX_CALLS:
            raise InvalidFieldError("calls", f"{len(calls)} in one turn, more than {MAX_CALLS}")
        self.check_open()
        # The turn runs to its end even if the caller is gone: a retry finds its results.
        task = asyncio.create_task(
            self._run_turn(calls, digests, known), name=f"turn {self.lease_id}"
        )
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise self._lease_ended_error() from None
            raise

    async def diff(self) -> environments_pb2.WorkspaceDiff:
        """Changes of the calls.

        Raises:
            UnknownIdError: the lease has ended.
            ChangeTooLargeError: they exceed the limits, by the fault of what made them.
        """
        self.check_open()
        async with self.turn:
            self.check_ready()
            if not self.is_used:
                return environments_pb2.WorkspaceDiff()
            changes = await workspace_change.read_change(
                self._sandbox, self.source, self.change_limits, self.record.setup_files
            )
            self._accesses.write(changes)
            return changes

    @contextlib.asynccontextmanager
    async def open_files(self) -> AsyncIterator[Sandbox]:
        """Open the files for the controller, between two turns.

        Raises:
            UnknownIdError: the lease has ended.
        """
        async with self.turn:
            await self._open_for_visit()
            try:
                with crossing(SandboxError, f"lease {self.lease_id}"):
                    yield self._sandbox
            finally:
                self._identity = None

    @contextlib.asynccontextmanager
    async def run_program(self, program: Program) -> AsyncIterator[RunningProgram]:
        """Run a program next to the turns; it ends with the block.

        Raises:
            UnknownIdError: the lease has ended.
            FullError: there are too many.
        """
        async with self.turn:
            running = await self._programs.start(partial(self._start_program, program))
        try:
            yield running
        finally:
            await self._programs.close(running)
            self._num_visits += 1
            self._identity = None

    async def _start_program(self, program: Program) -> RunningProgram:
        await self._open_for_visit()
        return await self._sandbox.start(program)

    async def _open_for_visit(self) -> None:
        self.check_ready()
        self._num_visits += 1
        with crossing(SandboxError, f"lease {self.lease_id}"):
            await self.make_workspace()
        self._identity = None

    async def close(self) -> None:
        """End all programs and remove the files; a failure is logged."""
        self._closed = True
        await self.end_programs()
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)
        # A snapshot or rollback in progress ends first: it works on these files.
        async with self.turn:
            self._log.close()
            try:
                await self._sandbox.close()
                await asyncio.to_thread(folders.remove_folder, self.folder)
            except OSError:
                log.exception("the files of lease %s stay on the disk", self.lease_id)

    async def end_programs(self) -> None:
        """End the controller's programs."""
        await self._programs.end()

    def _lease_ended_error(self) -> UnknownIdError:
        return UnknownIdError(f"lease {self.lease_id} has ended")

    async def _run_turn(
        self, calls: Sequence[environments_pb2.ToolCall], digests: Digests, known: KnownIds
    ) -> list[environments_pb2.ToolResult]:
        async with self.turn:
            self.check_ready()
            self._results.check(digests, known)
            if fresh := [call for call in calls if not self._results.has(call.call_id)]:
                with crossing(SandboxError, f"lease {self.lease_id}"):
                    await self._run_fresh(fresh, digests)
            return self._results.of(calls)

    async def _run_fresh(
        self, calls: Sequence[environments_pb2.ToolCall], digests: Digests
    ) -> None:
        await self.make_workspace()
        if not self._sandbox.is_intact:
            self._closed = True
            raise UnknownIdError(f"lease {self.lease_id} was lost with what ran in it")
        parsed = [call_from_json(call.name, call.arguments_json) for call in calls]
        changes = any(self._may_change(call) for call in parsed)
        before = ""
        if changes:
            before = await self._workspace_identity()
            self._log.begin(before)
            self._identity = None
        try:
            workspace = self._sandbox.workspace
            workspace.codebase = self._codebase
            outcomes = await run_calls(self.toolset, workspace, parsed)
        except (UnavailableError, OSError) as error:
            if changes and (not before or await self._workspace_identity() != before):
                self._closed = True
                lost = f"lease {self.lease_id} was lost in a turn: {error}"
                raise UnknownIdError(lost) from error
            raise
        results = [
            messages.to_result_message(call.call_id, outcome)
            for call, outcome in zip(calls, outcomes, strict=True)
        ]
        response = environments_pb2.RunTurnResponse(results=call_results.truncate_results(results))
        fresh = {call.call_id: digests[call.call_id] for call in calls}
        self._results.add(response.results, fresh)
        if changes:
            self._log.end(fresh, response)

    def _may_change(self, call: ParsedCall | MalformedCall) -> bool:
        tool = self.toolset.tools.get(call.name) if isinstance(call, ParsedCall) else None
        return tool is not None and tool.access in _CHANGES

    async def _workspace_identity(self) -> str:
        """Identity of the workspace, empty if it cannot be computed cheaply.

        That is if it is too large or has special files, and while programs or jobs run.
        """
        # An image's repository is never read as a whole.
        if self.source.base is not None or self._programs or self._has_jobs():
            return ""
        if self._identity is None:
            try:
                found = await self._sandbox.read_files(folders.SMALL)
                self._identity = trees.tree_identity(found.tree) if found.is_plain else ""
            except folders.TooLargeError:
                self._identity = ""
            except FileNotFoundError:
                self._identity = self.source.key
        return self._identity

    def _has_jobs(self) -> bool:
        if not self.is_used or not self._sandbox.workspace.jobs.may_run:
            return False
        self._identity = None
        return True

    async def _exec(self, command: str, timeout_s: float) -> ExecResult:
        key = self.driver.repeatable_key(command)
        before = await self._workspace_identity() if key else ""
        visits = self._num_visits

        async def compute() -> tuple[CommandOutcome, bool]:
            self._identity = None
            outcome = await self._sandbox.run(command, timeout_s)
            is_same = bool(before) and await self._workspace_identity() == before
            return outcome, is_same and visits == self._num_visits

        if before:
            scope = f"{self.record.held.run_id} {self.record.template}"
            outcome = await self.cache.get(f"{scope} {before} {timeout_s} {key}", compute)
        else:
            outcome, _ = await compute()
        return call_results.exec_result(self._accesses.add(outcome))
