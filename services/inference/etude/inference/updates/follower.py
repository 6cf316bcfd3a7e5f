"""Follower of the accepted chain: keeps one engine at the newest version and reports its status."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace

from etude.common import weights
from etude.common.blobs import MissingError
from etude.common.errors import (
    EtudeError,
    StoreError,
    UnavailableError,
    UnknownIdError,
    WrongStateError,
)
from etude.common.weights import MAX_LAG, ReaderLease, VersionId
from etude.inference import metrics
from etude.inference.engine.interface import PolicyEngine
from etude.inference.status import ReplicaState, ReplicaStatus
from etude.inference.updates.audit import Auditor
from etude.inference.updates.channel import SERVES_NOTHING, FollowedChannel
from etude.inference.updates.staging import Stager
from etude.inference.updates.updater import ActivatedVersion, Updater

REASON = "ReplicaLagging"

READY_LAG = 2
"""Largest lag at which a replica becomes ready; one that is ready stays so up to MAX_LAG.

The gap keeps a few slow versions from taking a replica out of rotation and back in.
"""


def is_near(lag: int, *, was_near: bool) -> bool:
    """True if a replica with this lag gets new requests."""
    return lag <= (MAX_LAG if was_near else READY_LAG)


def lag_versions(live: VersionId, wanted: VersionId, chain: Sequence[VersionId]) -> int:
    """Number of accepted versions between the live and the wanted one.

    Version numbers alone do not tell: they have gaps where a run was resumed.
    """
    return sum(live.number < each.number <= wanted.number for each in chain)


def may_lag(live: VersionId | None, wanted: VersionId) -> bool:
    """True if by the numbers alone a replica may lag too far to become ready."""
    return wanted.number - (0 if live is None else live.number) > READY_LAG


@dataclass(slots=True)
class VersionLag:
    """Known lag of a replica behind the version that it should serve.

    While the store does not answer, no newer version is known: the lag stays as it was.
    """

    is_near: bool = False
    _wanted: VersionId | None = None
    _chain: Sequence[VersionId] = ()

    def set_wanted(self, wanted: VersionId, chain: Sequence[VersionId]) -> None:
        """Set the wanted version, and the accepted chain if the numbers leave the lag open."""
        self._wanted, self._chain = wanted, chain

    def update_live(self, live: VersionId | None) -> None:
        """Update from the live version."""
        if live is not None and self._wanted is not None:
            self.is_near = is_near(
                lag_versions(live, self._wanted, self._chain), was_near=self.is_near
            )

    @property
    def message(self) -> str:
        """Reason for not being ready."""
        return f"too far behind version {self._wanted} for new requests"


POLL_S = 1.0
"""Polling interval for versions that were not announced."""
MAX_BACKOFF_S = 60.0
"""Longest backoff before a refused version is fetched again."""
MAX_STORE_BACKOFF_S = 8.0
"""Longest backoff while the store is unreachable: a retry costs one call."""


def backoff_s(failures: int, reason: str) -> float:
    """Backoff before the next poll, after a number of failures in a row."""
    longest_s = MAX_STORE_BACKOFF_S if reason == StoreError.reason else MAX_BACKOFF_S
    return min(POLL_S * float(1 << min(failures, 10)), longest_s)


@dataclass(slots=True, kw_only=True)
class VersionFollower:
    """Keeps one engine at the newest or pinned version, or at that of a channel.

    Every version is verified before a weight changes.
    """

    stager: Stager
    engine: PolicyEngine
    status: ReplicaStatus
    audit_every: int = 50
    """Versions between two full scans of the live weights."""
    instance: str = ""
    """Name of this process in the spans of its tokens; the replica's name unless set."""
    channel: FollowedChannel | None = None
    """Channel that decides which version is served, unless the engine is lent: then the newest of
    the run is. None takes orders of a trainer."""
    target: VersionId | None = None
    """Pinned version, or that of the channel; None follows the newest."""
    _auditor: Auditor = field(init=False)
    _updater: Updater = field(init=False)
    _update_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set and replaced at each status change."""
    _lag: VersionLag = field(default_factory=VersionLag)
    _tip: VersionId | None = None
    """Newest version at the last poll of the store."""
    _failures: int = 0
    _hinted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to poll without waiting."""

    def __post_init__(self) -> None:
        # An earlier process staged for memory that is gone with it.
        self.stager.keep_only()
        self._auditor = Auditor(
            engine=self.engine,
            store=self.stager.store,
            instance=self.instance or self.status.replica,
            every=self.audit_every,
        )
        self._updater = Updater(
            engine=self.engine,
            stager=self.stager,
            lease=ReaderLease(self.stager.store, self.status.replica),
            auditor=self._auditor,
            on_live=self._record_live,
            is_exact=self.channel is not None,
        )
        # An engine of a channel serves until it has the next version, however far that is.
        self._lag.is_near = self.channel is not None

    async def follow(self) -> None:
        """Activate every newer version, for ever; a refused one is retried with backoff.

        Raises:
            UnavailableError: the engine cannot go on.
        """
        while not self.engine.failed:
            with contextlib.suppress(EtudeError):  # reported in the status, which callers watch
                await self.catch_up()
            delay_s = backoff_s(self._failures, self.status.reason)
            if self.channel is not None:
                await self.channel.wait(delay_s)
                continue
            self._hinted.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._hinted.wait()
        raise UnavailableError(f"engine: {self.engine.failed}")

    def notify(self, version: VersionId) -> None:
        """Poll without waiting, because a version was announced; an old one is ignored."""
        live = self.engine.live
        if self.channel is None and (live is None or version.number > live.number):
            self._hinted.set()

    def set_target(self, target: VersionId | None) -> ReplicaStatus:
        """Pin a version, or follow the newest one; follow() then activates it.

        Raises:
            WrongStateError: the engine follows a channel.
        """
        self._require_no_channel()
        self.target = target
        self._set_status(self.status)
        self._hinted.set()
        return self.status

    async def catch_up(self) -> None:
        """Activate the wanted version if it is not live yet."""
        async with self._update_lock:
            with self._errors_in_status():
                wanted = await self._find_wanted()
                if wanted is None:
                    return
                if wanted != self.engine.live:
                    await self._activate(wanted)
                    return
                await asyncio.to_thread(self._updater.renew_lease)
                await self._measure_lag(wanted)
                self._failures = 0
                if self.status.reason and not self._updater.is_stuck:
                    self._set_status(
                        replace(self.status, state=ReplicaState.SERVING, reason="", message="")
                    )

    async def activate(self, version: VersionId) -> ReplicaStatus:
        """Activate this version, or leave the old one serving.

        A version at or below the live one on the accepted chain is a no-op.

        Raises:
            WrongStateError: the engine follows a channel.
            UnknownIdError: no such version is published.
            FencedError: it is not on the accepted chain.
            CorruptError: it is damaged or does not fit the model.
            StoreError: the store failed.
        """
        self._require_no_channel()
        async with self._update_lock:
            live = self.engine.live
            if version != live:
                with self._errors_in_status():
                    if not await self._is_behind(version, live):
                        await self._activate(version)
            self._move_pin(version)
            return self.status

    async def stage(self, version: VersionId) -> ReplicaStatus:
        """Prepare a version that a later activate() makes live; the old one serves.

        Raises:
            UnknownIdError: no such version is published.
            EtudeError: as activate().
        """
        self._require_no_channel()
        async with self._update_lock:
            live = self.engine.live
            with self._errors_in_status():
                if version != live and not await self._is_behind(version, live):
                    await self._measure_lag(version)
                    if not self._lag.is_near:
                        self._set_status(self._updating_status())
                    try:
                        await self._updater.stage(version)
                    except MissingError as cause:
                        raise UnknownIdError(_unknown(version, cause)) from cause
                    self._failures = 0
                    self._set_status(self.status)
            return self.status

    async def roll_back(self, version: VersionId) -> ReplicaStatus:
        """Return to an older version, and drop what was cached under newer ones.

        Raises:
            EtudeError: as activate().
        """
        self._require_no_channel()
        async with self._update_lock:
            live = self.engine.live
            if live is not None and version.number < live.number:
                with self._errors_in_status():
                    await self._activate(version)
            self._move_pin(version)
            return self.status

    def _move_pin(self, version: VersionId) -> None:
        """Move an existing pin to the version that the replica is told to serve."""
        if self.target is not None and self.target != version:
            self.target = version
            self._set_status(self.status)

    async def watch(self) -> AsyncIterator[ReplicaStatus]:
        """The current status, then the latest after each change."""
        while True:
            changed = self._changed
            yield self.status
            await changed.wait()

    def _require_no_channel(self) -> None:
        if self.channel is not None:
            raise WrongStateError(
                f"{self.status.replica} follows channel {self.channel.name!r}, whose records alone "
                "decide which version it serves"
            )

    async def _find_wanted(self) -> VersionId | None:
        """Read which version to serve; None if there is none."""
        if self.channel is not None and not self.channel.lending.is_lent:
            return await self._read_channel(self.channel)
        if self.channel is not None:
            self.target = None  # of the channel
        newest = await asyncio.to_thread(self._newest)
        if newest is None:
            return None
        self._tip = newest
        self._observe_lag()
        return self.target or newest

    async def _read_channel(self, channel: FollowedChannel) -> VersionId | None:
        self.target = await asyncio.to_thread(channel.poll)
        channel.observe(self.engine.live)
        if self.target is None and self.status.message != channel.idle_message:
            state = ReplicaState.SERVING if self.engine.live else ReplicaState.LOADING
            why = channel.idle_message
            self._set_status(replace(self.status, state=state, reason=SERVES_NOTHING, message=why))
        return self.target

    def _newest(self) -> VersionId | None:
        store = self.stager.store
        return weights.newest_version(store, besides=weights.list_quarantined(store))

    async def _is_behind(self, version: VersionId, live: VersionId | None) -> bool:
        if live is None or version.number > live.number:
            return False
        chain = await asyncio.to_thread(weights.accepted_chain, self.stager.store)
        return version in chain and live in chain

    async def _activate(self, version: VersionId) -> None:
        await self._measure_lag(version)
        if (status := self._updating_status()) != self.status:
            self._set_status(status)
        try:
            await self._updater.activate(version)
        except MissingError as cause:
            raise UnknownIdError(_unknown(version, cause)) from cause
        self._failures = 0
        self._set_status(replace(self.status, state=ReplicaState.SERVING, reason="", message=""))

    async def _measure_lag(self, wanted: VersionId) -> None:
        """Measure the lag behind a version that a trainer publishes."""
        if self.channel is not None:
            return
        live = self.engine.live
        chain: list[VersionId] = []
        if may_lag(live, wanted):
            chain = await asyncio.to_thread(weights.accepted_chain, self.stager.store)
        self._lag.set_wanted(wanted, chain)
        self._lag.update_live(live)

    def _record_live(self, activated: ActivatedVersion) -> None:
        self._lag.update_live(activated.live)
        self.status = replace(
            self.status,
            live=activated.live,
            manifest_sha256=activated.manifest_sha256,
            last_pause_s=activated.pause_s,
            last_commit_s=activated.took_s,
        )
        self._set_status(self._updating_status())
        self._observe_lag()
        if self.channel is not None:
            self.channel.observe(activated.live)

    def _updating_status(self) -> ReplicaStatus:
        """Status while a newer version is loaded."""
        status = self.status
        if status.live is None or self.engine.failed or self._updater.is_stuck:
            return status
        if not self._lag.is_near:
            return replace(
                status,
                state=ReplicaState.NOT_READY,
                reason=REASON,
                message=f"serves {status.live}, {self._lag.message}",
            )
        if status.reason == REASON:
            status = replace(status, reason="", message="")
        return replace(status, state=ReplicaState.CATCHING_UP)

    @contextlib.contextmanager
    def _errors_in_status(self) -> Iterator[None]:
        try:
            yield
        except EtudeError as error:
            self._failures += 1
            is_lost = self.engine.failed or self._updater.is_stuck
            is_usable = self.engine.live and self._lag.is_near and not is_lost
            state = ReplicaState.CATCHING_UP if is_usable else ReplicaState.NOT_READY
            self._set_status(
                replace(self.status, state=state, reason=error.reason, message=str(error))
            )
            raise

    def _set_status(self, status: ReplicaStatus) -> None:
        swap, updater = self.engine.swap, self._updater
        self.status = replace(
            status,
            staged=updater.staged,
            target=self.target,
            state_digest=bytes.fromhex(swap.state) if swap.live else b"",
            undo_depth=swap.undo_stack.depth,
            suspect_since=self._auditor.suspect_since,
        )
        self._changed.set()
        self._changed = asyncio.Event()

    def _observe_lag(self) -> None:
        live, tip = self.engine.live, self._tip
        if live is not None and tip is not None:
            behind = max(0, tip.number - live.number)
            metrics.WEIGHTS_LAG.labels(self.status.replica).set(behind)


def _unknown(version: VersionId, cause: MissingError) -> str:
    return f"version {version}: {cause} is not in the store"
