"""Client of one engine's weight service."""

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field
from typing import TypeVar

import grpc

from etude.common.errors import UnavailableError
from etude.common.rpc import channels
from etude.common.weights import VersionId
from etude.v1 import weights_pb2, weights_pb2_grpc

log = logging.getLogger(__name__)

RETRY_S = 0.5

LOOK_S = 2.0
"""Timeout of calls that cost the engine nothing."""

_WAITED_FOR = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.NOT_FOUND,
    }
)
"""Codes of an engine that starts, restarts, or does not see the new manifest yet."""

_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")


class ContentRefusedError(UnavailableError):
    """An engine refused a version's content: damaged, or not leading to its state."""

    reason = "ContentRefused"


@dataclass(slots=True)
class EngineWeightClient:
    """Client of one engine's weight service."""

    target: str
    timeout_s: float
    """Timeout of calls that the engine must carry out."""
    _channel: grpc.aio.Channel | None = field(default=None)

    async def stage(self, version: VersionId) -> weights_pb2.WeightStatus:
        """Stage a version: the engine fetches and verifies it.

        Raises:
            ContentRefusedError: its content is wrong.
            UnavailableError: the engine cannot, or not in time.
        """
        request = weights_pb2.StageVersionRequest(version=version.to_proto())
        return (await self._call(self._stub.StageVersion, request, version)).status

    async def activate(self, version: VersionId) -> weights_pb2.WeightStatus:
        """Activate a version: the engine serves it.

        Raises:
            ContentRefusedError: its content is wrong.
            UnavailableError: the engine cannot, or not in time.
        """
        request = weights_pb2.CommitVersionRequest(version=version.to_proto())
        return (await self._call(self._stub.CommitVersion, request, version)).status

    async def roll_back(self, version: VersionId) -> weights_pb2.WeightStatus:
        """Roll back to a version.

        Raises:
            ContentRefusedError: its content is wrong.
            UnavailableError: the engine cannot, or not in time.
        """
        request = weights_pb2.RollbackVersionRequest(version=version.to_proto())
        return (await self._call(self._stub.RollbackVersion, request, version)).status

    async def pin(self, version: VersionId | None) -> None:
        """Pin the engine to a version; None lets it update itself again.

        Raises:
            UnavailableError: it does not answer.
        """
        proto = None if version is None else version.to_proto()
        request = weights_pb2.SetTargetRequest(version=proto)
        await self._call(self._stub.SetTarget, request, version)

    async def announce(self, version: VersionId) -> None:
        """Announce a version; an engine that misses it finds the version later."""
        request = weights_pb2.AnnounceVersionRequest(version=version.to_proto())
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self._stub.AnnounceVersion(request, timeout=LOOK_S)

    async def status(self) -> weights_pb2.WeightStatus | None:
        """Weight status of the engine; None if it does not answer."""
        request = weights_pb2.GetWeightStatusRequest()
        try:
            answer = await self._stub.GetWeightStatus(request, timeout=LOOK_S)
        except grpc.aio.AioRpcError:
            return None
        return answer.status

    async def close(self) -> None:
        if self._channel is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._channel.close()

    async def _call(
        self,
        rpc: "grpc.aio.UnaryUnaryMultiCallable[_Request, _Answer]",
        request: _Request,
        version: VersionId | None,
    ) -> _Answer:
        """Retry an idempotent call until time is up.

        Raises:
            ContentRefusedError: the engine refuses the content.
            UnavailableError: another error that a retry does not cure, or time is up.
        """
        name = type(request).__name__.removesuffix("Request")
        deadline_s = time.monotonic() + self.timeout_s
        while True:
            left_s = deadline_s - time.monotonic()
            try:
                return await rpc(request, timeout=max(0.1, left_s))
            except grpc.aio.AioRpcError as error:
                words = f"engine {self.target}: {name} {version}: {error.details()}"
                if error.code() is grpc.StatusCode.DATA_LOSS:
                    raise ContentRefusedError(words) from error
                if error.code() not in _WAITED_FOR or left_s < RETRY_S:
                    raise UnavailableError(words) from error
                await asyncio.sleep(RETRY_S)

    @property
    def _stub(self) -> "weights_pb2_grpc.WeightServiceAsyncStub":
        if self._channel is None:
            self._channel = channels.dial(self.target)
        stub: weights_pb2_grpc.WeightServiceAsyncStub = weights_pb2_grpc.WeightServiceStub(
            self._channel
        )
        return stub
