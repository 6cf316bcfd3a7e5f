"""Channel that an engine follows: the version that its newest record names."""

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field

from etude.common.blobs import Store
from etude.common.errors import CorruptError, EtudeError
from etude.common.release.channels import (
    ChannelRecord,
    channel_key,
    find_readable_records,
    newest_record,
)
from etude.common.weights import VersionId
from etude.inference import metrics
from etude.inference.lending import LendingControl

log = logging.getLogger(__name__)

SERVES_NOTHING = "ChannelServesNothing"
"""Reason in the status; the version that was served last stays live."""

POLL_S = 1.0
"""Interval of looks at the records: a roll-back must not wait for the retry of a version."""


@dataclass(slots=True, kw_only=True)
class FollowedChannel:
    """Reader of one channel's records."""

    store: Store
    name: str
    run_uid: str
    """Run whose versions the engine can serve."""
    record: ChannelRecord | None = None
    """The newest record that could be used; None before the first."""
    lending: LendingControl = field(default_factory=LendingControl)
    """While it is lent, the run decides which version is served."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the engine has changed hands."""

    def __post_init__(self) -> None:
        self.lending.on_change = self._changed.set

    def poll(self) -> VersionId | None:
        """Read the channel, and return the version that it serves; None if it serves nothing.

        An engine that starts and cannot use the newest record serves the one before, as engines do
        that ran when the newest was written; its next look raises.

        Raises:
            CorruptError: the newest record is damaged, or names a version of another run; the
                record before it counts.
            StoreError: the store failed; the record before counts.
        """
        known = 0 if self.record is None else self.record.number
        try:
            newest = newest_record(self.store, self.name, known=known)
            if newest is not None:
                self._check_run(newest)
                self.record = newest
                metrics.CHANNEL_RECORD.labels(self.name).set(newest.number)
        except CorruptError as error:
            metrics.CHANNEL_FOLLOWED.labels(self.name).set(0)
            if self.record is not None or (earlier := self._find_earlier()) is None:
                raise
            log.warning("record %d counts: %s", earlier.number, error)
            self.record = earlier
            metrics.CHANNEL_RECORD.labels(self.name).set(earlier.number)
        return self.version

    async def wait(self, delay_s: float) -> None:
        """Wait for so long, or until the engine may have to serve another version."""
        before = self.record
        for number in range(max(1, round(delay_s / POLL_S))):
            if number:
                with contextlib.suppress(EtudeError):  # the next poll() reports it
                    await asyncio.to_thread(self.poll)
            self.lending.expire(now_s=time.monotonic())
            if self.record is not before or self._changed.is_set():
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._changed.wait()
        self._changed.clear()

    @property
    def version(self) -> VersionId | None:
        """Version that the channel serves, as it was read last."""
        served = None if self.record is None else self.record.served
        return None if served is None else served.version

    @property
    def idle_message(self) -> str:
        """Reason why the channel serves nothing."""
        if self.record is None:
            return f"channel {self.name!r} has no record yet"
        return f"channel {self.name!r} serves nothing since record {self.record.number}"

    def observe(self, live: VersionId | None) -> None:
        """Update the state and the metric of an engine with this live version."""
        if self.version == live:
            # Not while the channel serves nothing: the live version is one that nobody released.
            self.lending.confirm_returned(now_s=time.monotonic())
        is_followed = self.version in {None, live}
        metrics.CHANNEL_FOLLOWED.labels(self.name).set(is_followed or self.lending.is_lent)

    def _find_earlier(self) -> ChannelRecord | None:
        """Find the newest record that can be used; None if there is none."""
        for record in find_readable_records(self.store, self.name):
            with contextlib.suppress(CorruptError):
                self._check_run(record)
                return record
        return None

    def _check_run(self, record: ChannelRecord) -> None:
        if record.served is not None and record.served.run_uid != self.run_uid:
            key = channel_key(self.name, record.number)
            raise CorruptError(
                f"{self.store.url}/{key}: version {record.served.version} is of run "
                f"{record.served.run_uid}, not {self.run_uid}"
            )
