"""Commands to the controller, which it reads between steps and while it waits."""

import asyncio
import json
import logging
import math
import sys
import time
import traceback
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import TypeVar

from etude.common.api.run.checkpointing import Checkpointing
from etude.common.api.run.spec import Evaluation, RLRunSpec
from etude.common.api.schema.crd import FROZEN
from etude.common.checkpoints.manifest import Reason
from etude.common.errors import InvalidFieldError
from etude.trainer.controller.checkpoints.cadence import CheckpointRequests
from etude.v1 import run_pb2

log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_REMEMBERED = 4_096
"""Number of command ids to remember, so that a repeated command is ignored."""


@dataclass(slots=True)
class RunCommands:
    """Commands of the run's owner, each accepted once."""

    spec: RLRunSpec
    """Newest one; only the fields that may change while running differ from the first."""
    generation: int
    """Of the spec."""
    wants_checkpoint: bool = False
    requests: CheckpointRequests = field(default_factory=CheckpointRequests)
    """Requests for on-demand checkpoints."""
    engines: int = 0
    """Number of engines to use; 0 for the initial number."""
    lenders: tuple[str, ...] = ()
    """Engines of routes, which the run may use while they are lent."""
    suspend: run_pb2.SuspendRun | None = None
    stop_requested: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the controller must stop."""
    stop_requested_s: float = math.inf
    """Time of the first request to stop, of time.monotonic()."""
    _seen: dict[str, None] = field(default_factory=dict)

    @property
    def checkpointing(self) -> Checkpointing:
        return self.spec.checkpointing

    @property
    def evaluation(self) -> tuple[Evaluation, ...]:
        return self.spec.evaluation

    def accept(self, request: run_pb2.CommandRequest) -> None:
        """Accept a command; one with a known id changes nothing.

        Raises:
            InvalidFieldError: the command is empty or its spec is invalid.
        """
        if not request.command_id:
            raise InvalidFieldError("command_id", "is empty")
        if request.command_id in self._seen:
            return
        self._carry_out(request)
        self._seen[request.command_id] = None
        while len(self._seen) > _MAX_REMEMBERED:
            del self._seen[next(iter(self._seen))]

    def _carry_out(self, request: run_pb2.CommandRequest) -> None:
        match request.WhichOneof("what"):
            case "checkpoint":
                self._request_checkpoint(request.checkpoint)
            case "suspend":
                self.suspend = request.suspend
                self.request_stop()
            case "configure":
                self._configure(request.configure)
            case "scale_engines":
                self.engines = request.scale_engines.replicas
            case "set_lenders":
                self.lenders = tuple(request.set_lenders.targets)
            case "dump_stacks":
                dump_stacks()
            case _:
                raise InvalidFieldError("what", "is unset")

    @property
    def final_save_reason(self) -> Reason | None:
        """Reason of the checkpoint before stopping; None for no checkpoint."""
        if self.suspend is None:
            return "Suspend" if self.checkpointing.on_suspend == "Always" else None
        if not self.suspend.checkpoint:
            return None
        return "Failure" if self.suspend.is_failure else "Suspend"

    def _request_checkpoint(self, order: run_pb2.CheckpointNow) -> None:
        if order.request:
            self.requests.add(order.request)
        else:
            self.wants_checkpoint = True

    async def run_unless_stopped(self, work: Awaitable[T]) -> T | None:
        """Await some work; None if the controller was told to stop meanwhile."""
        task = asyncio.ensure_future(work)
        stopped = asyncio.ensure_future(self.stop_requested.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return await task if task.done() else None
        finally:
            stopped.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    def request_stop(self) -> None:
        self.stop_requested_s = min(self.stop_requested_s, time.monotonic())
        self.stop_requested.set()

    def _configure(self, order: run_pb2.ConfigureRun) -> None:
        """Apply the fields that may change while running.

        Raises:
            InvalidFieldError: the spec is invalid, or differs in another field; nothing changes.
        """
        try:
            spec = RLRunSpec.parse_known_fields(json.loads(order.spec_json))
        except ValueError as cause:
            raise InvalidFieldError("configure.spec_json", str(cause)) from cause
        if order.generation < self.generation:
            return  # an older spec that was delivered late
        for name in FROZEN:
            if getattr(spec, name) != getattr(self.spec, name):
                raise InvalidFieldError(f"configure.spec_json.{name}", "is fixed while running")
        self.spec = spec
        self.generation = order.generation


def dump_stacks() -> None:
    """Write the stacks of all threads and tasks to the log."""
    for thread, frame in sys._current_frames().items():
        log.warning("stack of thread %d:\n%s", thread, _stack(frame))
    try:
        tasks: Iterable[asyncio.Task[object]] = asyncio.all_tasks()
    except RuntimeError:
        return  # no event loop runs here
    for task in tasks:
        frames = task.get_stack(limit=20)
        log.warning("stack of task %s:\n%s", task.get_name(), "".join(map(_line, frames)))


def _stack(frame: FrameType) -> str:
    return "".join(traceback.format_stack(frame, limit=40))


def _line(frame: FrameType) -> str:
    return f"  {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}\n"
