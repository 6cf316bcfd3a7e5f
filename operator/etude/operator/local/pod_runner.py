"""Pod runner: starts, probes, restarts and ends the process of one pod."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from etude.common.backoff import Backoff
from etude.operator.clock import rfc3339
from etude.operator.local import probes as local_probes
from etude.operator.local.child_process import ChildProcess
from etude.operator.local.ports import LOOPBACK
from etude.operator.local.process_spec import ProcessSpec
from etude.operator.manifests import Manifest

log = logging.getLogger(__name__)

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 60.0
STARTING_GRACE_S = 5.0
"""Grace period of a process that was never ready or no longer answers, and has nothing to save."""

MAX_MESSAGE = 4_096
"""Characters of a termination message that are kept, as with a kubelet."""

BACKOFF_RESET_S = 600.0
"""A process that ran this long restarts without backoff, as with a kubelet."""


@dataclass(slots=True)
class PodRunner:
    """Runs the process of one pod and reports its status."""

    name: str
    make_spec: Callable[[], ProcessSpec]
    """Called before every start; raises KeyError if a mounted ConfigMap does not exist yet."""
    report_status: Callable[[Manifest], None]
    spec: ProcessSpec | None = field(default=None, init=False)
    child: ChildProcess | None = field(default=None, init=False)
    restarts: int = field(default=0, init=False)
    _was_ready: bool = field(default=False, init=False)
    _grace_s: float | None = field(default=None, init=False)
    _stop: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _hurry: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _last: Manifest | None = field(default=None, init=False)
    _reported: Manifest | None = field(default=None, init=False)

    async def run(self) -> None:
        """Start, probe and restart until stop() is called or the pod is finished."""
        backoff = Backoff(FIRST_DELAY_S, LONGEST_DELAY_S)
        while not self._stop.is_set():
            began = asyncio.get_running_loop().time()
            try:
                code = await self._run_once()
            except (OSError, KeyError) as cause:
                self._report_waiting("CreateContainerError", f"cannot start: {cause}")
            else:
                if self._stop.is_set():
                    break
                if not self.current_spec.restarts:
                    self._report_finished(code)
                    await self._stop.wait()
                    break
                self.restarts += 1
                self._report_waiting(
                    "CrashLoopBackOff", f"exit code {code}, restarts in {backoff.delay_s} s"
                )
            if asyncio.get_running_loop().time() - began > BACKOFF_RESET_S:
                backoff.reset()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), backoff.next_s())

    @property
    def current_spec(self) -> ProcessSpec:
        assert self.spec is not None, "asked before the first start"  # noqa: S101 - our mistake
        return self.spec

    def stop(self, *, now: bool = False, grace_s: float | None = None) -> None:
        """Ask the process and its pod to end; now skips the grace period."""
        self._grace_s = grace_s
        self._stop.set()
        if now:
            self.skip_grace()

    def skip_grace(self) -> None:
        """End the grace period of the present or a later stop."""
        self._hurry.set()

    async def _run_once(self) -> int:
        self._was_ready = False
        process = self.spec = self.make_spec()
        _prepare(process, self.name, self.restarts)
        child = self.child = ChildProcess.start(
            process.command, env=process.env, folder=process.folder, log=process.log
        )
        log.info("%s started as process %d, log %s", self.name, child.pid, process.log)
        self._report_running(is_ready=False)
        try:
            code = await self._until_ended(process, child)
        finally:
            self.child = None
        log.info("%s ended with exit code %d", self.name, code)
        self._record_exit(child, code, process.message)
        return code

    async def _until_ended(self, process: ProcessSpec, child: ChildProcess) -> int:
        over = asyncio.create_task(child.wait(), name=f"{self.name}-wait")
        stop = asyncio.create_task(self._stop.wait(), name=f"{self.name}-stop")
        probes = asyncio.create_task(
            local_probes.run_probes(
                process, lambda is_ready: self._report_running(is_ready=is_ready)
            ),
            name=f"{self.name}-probes",
        )
        try:
            await asyncio.wait({over, stop, probes}, return_when=asyncio.FIRST_COMPLETED)
            if not over.done():
                self._log_probe_failure(probes)
                given_s = process.grace_s if self._grace_s is None else self._grace_s
                # A process that does not answer, or never did, has nothing to save.
                is_sound = self._was_ready and not probes.done()
                limit_s = given_s if is_sound else STARTING_GRACE_S
                await self._end(child, over, min(given_s, limit_s))
            return await over
        except asyncio.CancelledError:
            child.kill()
            await over
            raise
        finally:
            for task in (stop, probes):
                task.cancel()

    def _log_probe_failure(self, probes: "asyncio.Task[None]") -> None:
        if not probes.done():
            return
        error = probes.exception()
        if isinstance(error, local_probes.UnresponsiveError):
            log.warning("%s restarts: %s", self.name, error)
        elif error is not None:
            raise error

    async def _end(self, child: ChildProcess, over: "asyncio.Task[int]", grace_s: float) -> None:
        """Send SIGTERM, then SIGKILL after the grace period or after skip_grace()."""
        child.terminate()
        hurry = asyncio.create_task(self._hurry.wait(), name=f"{self.name}-hurry")
        await asyncio.wait({over, hurry}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not over.done():
            log.warning("%s did not end within its grace period and is killed", self.name)
            child.kill()

    def _report_running(self, *, is_ready: bool) -> None:
        self._was_ready = self._was_ready or is_ready
        self._report("Running", {"running": {}}, is_ready=is_ready)

    def _report_waiting(self, reason: str, message: str) -> None:
        log.warning("%s: %s", self.name, message)
        state = {"waiting": {"reason": reason, "message": message}}
        self._report("Running", state, is_ready=False)

    def _report_finished(self, code: int) -> None:
        self._report("Failed" if code else "Succeeded", self._last or {}, is_ready=False)

    def _record_exit(self, child: ChildProcess, code: int, message: Path) -> None:
        ended: Manifest = {
            "exitCode": code,
            "reason": "Error" if code else "Completed",
            "finishedAt": rfc3339(time.time()),
        }
        if message.exists():
            ended["message"] = message.read_text(errors="replace")[:MAX_MESSAGE]
        elif code:
            ended["message"] = child.log_tail()
        self._last = {"terminated": ended}

    def _report(self, phase: str, state: Manifest, *, is_ready: bool) -> None:
        container: Manifest = {
            "name": "main",
            "ready": is_ready,
            "restartCount": self.restarts,
            "state": state,
        }
        if self._last is not None:
            container["lastState"] = self._last
        status = {
            "phase": phase,
            "podIP": LOOPBACK,
            "conditions": [{"type": "Ready", "status": "True" if is_ready else "False"}],
            "containerStatuses": [container],
        }
        if status != self._reported:
            self._reported = status
            self.report_status(status)


def _prepare(process: ProcessSpec, name: str, restarts: int) -> None:
    """Create folders and files, and mark the start in the log."""
    for folder in (process.folder, *process.volumes, process.log.parent):
        folder.mkdir(parents=True, exist_ok=True)
    process.message.unlink(missing_ok=True)
    for path, text in process.files.items():
        path.write_text(text)
    with process.log.open("a") as output:
        output.write(f"=== {name} start {restarts} {rfc3339(time.time())}\n")
