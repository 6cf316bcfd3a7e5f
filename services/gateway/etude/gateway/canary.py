"""Canary channel that a gateway follows: its newest record decides which users have the canary."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from etude.common.blobs import Store
from etude.common.errors import CorruptError, StoreError
from etude.common.release.channels import CANARY, ChannelExperiment, ChannelRecord, newest_record
from etude.common.rpc.channels import CONTROL_DEADLINE_S
from etude.common.weights import VersionId
from etude.gateway import metrics
from etude.v1 import weights_pb2, weights_pb2_grpc

log = logging.getLogger(__name__)

POLL_S = 1.0
FIRST_POLL_S = 5.0
"""A gateway that starts waits so long for its first look at the channel."""


@dataclass(slots=True)
class CanaryWatch:
    """Reader of the canary channel's records.

    Users are assigned to arms once the engines of the canary serve the version of the record: until
    then they may have one that was rolled back.
    """

    store: Store
    engines: "Sequence[weights_pb2_grpc.WeightServiceAsyncStub]"
    """Of the canary."""
    experiment: ChannelExperiment | None = None
    """Assigns users to arms now; None gives everyone the stable channel."""
    _record: ChannelRecord | None = None
    _confirmed: VersionId | None = None
    """Version of the record that the engines were seen to serve."""
    _problem: str = ""

    async def run(self) -> None:
        """Follow the records, for ever."""
        while True:
            await self.poll()
            await asyncio.sleep(POLL_S)

    async def start(self) -> None:
        """Look at the channel before the first request, so that a restart changes no user's arm."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_POLL_S):
                await self.poll()

    async def poll(self) -> None:
        """Read the newest record. While the store is away, the one before counts."""
        problem, is_damaged = "", False
        known = 0 if self._record is None else self._record.number
        try:
            newest = await asyncio.to_thread(newest_record, self.store, CANARY, known=known)
            self._record = newest or self._record
        except CorruptError as error:
            # It may be a roll-back.
            problem, is_damaged = f"nobody has the canary: {error}", True
        except StoreError as error:
            problem = f"the canary's users stay as they are: {error}"
        if problem and problem != self._problem:
            log.warning("%s", problem)
        self._problem = problem
        self.experiment = None if is_damaged else await self._find_experiment()
        metrics.CANARY_RECORD.set(0 if self._record is None else self._record.number)
        metrics.CANARY_SHARE.set(0 if self.experiment is None else self.experiment.share)

    async def _find_experiment(self) -> ChannelExperiment | None:
        served = None if self._record is None else self._record.served
        if self._record is None or served is None:
            self._confirmed = None
            return None
        if self._confirmed != served.version:
            self._confirmed = served.version if await self._is_live(served.version) else None
        return self._record.experiment if self._confirmed else None

    async def _is_live(self, version: VersionId) -> bool:
        """Return true if every engine that answers serves a version, and one does."""
        statuses = await asyncio.gather(*map(_read_live, self.engines))
        return {live for live in statuses if live is not None} == {version}


async def _read_live(engine: "weights_pb2_grpc.WeightServiceAsyncStub") -> VersionId | None:
    """Read the live version of an engine; None if it has none, or does not answer."""
    request = weights_pb2.GetWeightStatusRequest()
    try:
        answer = await engine.GetWeightStatus(request, timeout=CONTROL_DEADLINE_S)
    except grpc.aio.AioRpcError:
        return None
    has_live = answer.status.HasField("live")
    return VersionId.from_proto(answer.status.live) if has_live else None
