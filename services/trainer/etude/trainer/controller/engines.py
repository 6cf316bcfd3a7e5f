"""The engines' weights: which replicas serve which version, and are in rotation."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import grpc

from etude.common import channels
from etude.common.errors import UnavailableError
from etude.common.weights import VersionId
from etude.v1 import weights_pb2, weights_pb2_grpc

log = logging.getLogger(__name__)

GRACE_S = 15.0
"""How long slower replicas may take after the first one serves, before they leave rotation."""

RETRY_S = 0.5

_WAITED_FOR = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.NOT_FOUND,
    }
)
"""An engine that starts, restarts, or does not see the new manifest yet."""


class EnginesLateError(UnavailableError):
    """No engine served a version within the run's limit."""

    reason = "EnginesNotServing"


@dataclass(slots=True)
class Engines:
    """One weight client per replica."""

    targets: Sequence[str]
    timeout_s: float
    """Longest wait for the first replica that serves a version."""
    grace_s: float = GRACE_S
    rotation: tuple[str, ...] = ()
    """Replicas that serve the newest committed version."""
    last_pause_s: float = 0.0
    """Longest engine pause of the newest commit."""
    _channels: dict[str, grpc.aio.Channel] = field(default_factory=dict)

    async def commit(self, version: VersionId) -> None:
        """Have every replica serve the version; those that lag leave rotation.

        Raises:
            EnginesLateError: none served it in time.
            UnavailableError: none can: the weights are damaged, or of another model.
        """
        if not self.targets:
            return
        tasks = {
            asyncio.create_task(self._commit_one(target, version), name=f"commit-{target}"): target
            for target in self.targets
        }
        try:
            await self._wait(tasks)
            ended = {task for task in tasks if task.done()}
        finally:
            for task in tasks:
                task.cancel()
        statuses = {tasks[task]: task.result() for task in ended if task.exception() is None}
        if not statuses:
            raise _refusal(ended) or EnginesLateError(
                f"no engine of {', '.join(self.targets)} served version {version}"
                f" within {self.timeout_s:.0f} s: see the logs of the inference role"
            )
        self.rotation = tuple(target for target in self.targets if target in statuses)
        self.last_pause_s = max(status.last_pause_seconds for status in statuses.values())
        for task, target in tasks.items():
            if task not in ended:
                log.warning("engine %s lags behind %s and leaves rotation", target, version)
            elif (refusal := task.exception()) is not None:
                log.warning("engine %s leaves rotation: %s", target, refusal)

    async def _wait(self, tasks: Collection[asyncio.Task[weights_pb2.WeightStatus]]) -> None:
        """Until all are done, or time is up; the first that serves starts the others' grace."""
        now_s = asyncio.get_running_loop().time
        end_s, pending, serves = now_s() + self.timeout_s, set(tasks), False
        while pending:
            done, pending = await asyncio.wait(
                pending,
                timeout=max(0.0, end_s - now_s()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not done:
                return
            if not serves and any(task.exception() is None for task in done):
                serves, end_s = True, min(end_s, now_s() + self.grace_s)

    async def _commit_one(self, target: str, version: VersionId) -> weights_pb2.WeightStatus:
        stub = weights_pb2_grpc.WeightServiceStub(self._channel(target))
        request = weights_pb2.CommitVersionRequest(version=version.to_proto())
        deadline = time.monotonic() + self.timeout_s
        while True:
            remaining_s = deadline - time.monotonic()
            try:
                answer = await stub.CommitVersion(request, timeout=max(0.1, remaining_s))
            except grpc.aio.AioRpcError as error:
                if error.code() not in _WAITED_FOR or remaining_s < RETRY_S:
                    raise UnavailableError(
                        f"engine {target}: CommitVersion {version}: {error.details()}"
                    ) from error
                await asyncio.sleep(RETRY_S)
            else:
                return answer.status

    def _channel(self, target: str) -> grpc.aio.Channel:
        if target not in self._channels:
            self._channels[target] = channels.dial(target)
        return self._channels[target]

    async def close(self) -> None:
        """Close every channel."""
        for channel in self._channels.values():
            with contextlib.suppress(asyncio.CancelledError):
                await channel.close()


def _refusal(
    done: Collection[asyncio.Task[weights_pb2.WeightStatus]],
) -> BaseException | None:
    return next((error for task in done if (error := task.exception()) is not None), None)
