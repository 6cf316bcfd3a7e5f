"""Engine of an evaluation: pinned to one policy version, which it proves by digest."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc

from etude.common.errors import CorruptError, UnavailableError
from etude.common.rpc import channels
from etude.common.rpc.channels import CONTROL_DEADLINE_S
from etude.common.weights import VersionId
from etude.v1 import weights_pb2, weights_pb2_grpc

log = logging.getLogger(__name__)

POLL_S = 2.0
LONGEST_START_S = 3_600.0
"""Building an engine and loading a large model take minutes."""


@dataclass(slots=True, kw_only=True)
class PinnedEngine:
    """Keeps an engine at one version: one that restarted would follow the newest version."""

    target: str
    """host:port."""
    version: VersionId
    digest: bytes
    """SHA-256 of the version's manifest in the store."""
    poll_s: float = POLL_S
    start_s: float = LONGEST_START_S
    _channel: grpc.aio.Channel = field(init=False)
    _problem: str = ""

    @contextlib.asynccontextmanager
    async def pin(self) -> AsyncIterator[None]:
        """Pin the engine while the block runs; the version is live when it begins.

        Raises:
            CorruptError: the engine serves other content under the name of the version, or its
                memory was found damaged.
            UnavailableError: the version is not live in time.
        """
        self._channel = channels.dial(self.target)
        try:
            await self._await_live()
            keeper = asyncio.create_task(self._keep(), name="keep-pinned")
            try:
                yield
            finally:
                keeper.cancel()
                await asyncio.gather(keeper, return_exceptions=True)
            # Damage that an audit found meanwhile concerns what was sampled.
            await self._await_live()
        finally:
            await self._channel.close()

    async def _await_live(self) -> None:
        until_s = time.monotonic() + self.start_s
        while not self._is_live(await self._set_pin()):
            if time.monotonic() > until_s:
                what = f"does not serve version {self.version} after {self.start_s:.0f} s"
                raise UnavailableError(f"engine {self.target}: {what}: {self._problem}")
            await asyncio.sleep(self.poll_s)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self.poll_s)
            await self._set_pin()

    async def _set_pin(self) -> weights_pb2.WeightStatus | None:
        """The engine's status, once it is pinned; None while it does not answer."""
        stub: weights_pb2_grpc.WeightServiceAsyncStub = weights_pb2_grpc.WeightServiceStub(
            self._channel
        )
        wanted = self.version.to_proto()
        try:
            asked = weights_pb2.GetWeightStatusRequest()
            status = (await stub.GetWeightStatus(asked, timeout=CONTROL_DEADLINE_S)).status
            if not status.HasField("target") or status.target != wanted:
                log.info("engine %s is pinned to version %s", self.target, self.version)
                pinning = weights_pb2.SetTargetRequest(version=wanted)
                status = (await stub.SetTarget(pinning, timeout=CONTROL_DEADLINE_S)).status
        except grpc.aio.AioRpcError as error:
            self._problem = str(error.details())
            return None
        self._problem = f"{status.reason} {status.message}".strip() or "it loads the version"
        return status

    def _is_live(self, status: weights_pb2.WeightStatus | None) -> bool:
        """True if the engine serves the version, with the content that the store has.

        Raises:
            CorruptError: it serves other content, or its memory was found damaged.
        """
        if status is None or not status.HasField("live"):
            return False
        if VersionId.from_proto(status.live) != self.version:
            return False
        if status.manifest_sha256 != self.digest:
            found, wanted = status.manifest_sha256.hex()[:12], self.digest.hex()[:12]
            what = f"serves {self.version} with manifest {found}, the store has {wanted}"
            raise CorruptError(f"engine {self.target} {what}")
        if status.HasField("suspect_since"):
            what = f"an audit found its weights of {self.version} damaged"
            raise CorruptError(f"engine {self.target}: {what}")
        return status.state == weights_pb2.REPLICA_STATE_SERVING
