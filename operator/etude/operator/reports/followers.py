"""Follows the reports of every controller and broker whose pod is up."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.operator.cluster.api import Cluster
from etude.operator.manifests import Ref
from etude.operator.reports.latest import ReportBook
from etude.operator.reports.peers import PeerError, Peers

log = logging.getLogger(__name__)

PACE_S = 1.0
"""Figures that only move are looked at this often; anything else at once."""
FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 5.0
MOST_HAPPENINGS = 1_000
"""That wait to be registered: a controller that tells more is told to begin again after them."""

News = Callable[[Ref, float], None]
"""Told which object to look at, and within how many seconds."""


class Peer(NamedTuple):
    """Who speaks for an object."""

    uid: str
    place: int = 0
    """Among the brokers of a pool."""


class Following(NamedTuple):
    """Who is listened to, and the task that does it."""

    pod_uid: str
    task: asyncio.Task[None]


@dataclass(slots=True)
class Followers:
    """One task per peer; use it as part of a running task group."""

    cluster: Cluster
    book: ReportBook
    peers: Peers
    tell: News
    tasks: asyncio.TaskGroup
    _following: dict[Peer, Following] = field(default_factory=dict)

    def follow(self, key: Ref, peer: Peer, target: str, *, pod_uid: str) -> None:
        """Listen to a peer from now on; another pod under the same name is another peer."""
        known = self._following.get(peer)
        if known is not None and known.pod_uid != pod_uid:
            self.leave(peer)
        if peer not in self._following:
            listening = self._follow(key, peer, target)
            task = self.tasks.create_task(listening, name=f"follow-{key.name}")
            self._following[peer] = Following(pod_uid, task)
            if key.kind == "RLRun":
                self.book.began(peer.uid)

    def leave(self, peer: Peer) -> None:
        """Stop listening: the peer's pod is not there."""
        known = self._following.pop(peer, None)
        if known is not None:
            known.task.cancel()
            if peer.uid in self.book.runs:
                self.book.disconnected(peer.uid)
            if peer.uid in self.book.pools:
                self.book.pools[peer.uid].said.pop(peer.place, None)

    def leave_object(self, uid: str) -> None:
        """Stop listening to every peer of a run or pool."""
        for peer in [peer for peer in self._following if peer.uid == uid]:
            self.leave(peer)

    def leave_all(self) -> None:
        """Stop listening to anybody."""
        for peer in list(self._following):
            self.leave(peer)

    async def _follow(self, key: Ref, peer: Peer, target: str) -> None:
        """Listen until cancelled; what breaks off is listened to anew."""
        hear = self._hear_run if key.kind == "RLRun" else self._hear_pool
        delay_s = FIRST_DELAY_S
        while True:
            try:
                await hear(key, peer, target)
                delay_s = FIRST_DELAY_S
            except PeerError as error:
                log.info("%s/%s: %s", key.namespace, key.name, error)
                delay_s = FIRST_DELAY_S if self._break(key, peer) else delay_s
            except Exception:
                # One peer that we do not understand must not end the operator.
                log.exception("%s/%s cannot be followed", key.namespace, key.name)
                self._break(key, peer)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)

    def _break(self, key: Ref, peer: Peer) -> bool:
        """A stream has ended; whether it was a run's, and open."""
        if key.kind != "RLRun" or not self.book.run(peer.uid).is_connected:
            return False
        self.book.disconnected(peer.uid)
        self.tell(key, 0)
        return True

    async def _hear_run(self, key: Ref, peer: Peer, target: str) -> None:
        uid = peer.uid
        after = self.book.run(uid).done
        address = self.cluster.address(key.namespace, target)
        async for response in self.peers.watch_run(address, after):
            if response.run_uid != uid:
                raise PeerError(f"{address} serves run {response.run_uid}, not {uid}")
            if len(self.book.run(uid).happenings) >= MOST_HAPPENINGS:
                raise PeerError(f"{address} tells more than can be written down")
            was_connected = self.book.run(uid).is_connected
            if not was_connected:
                self.book.connected(uid)
            is_urgent = self.book.take(uid, response)
            self.tell(key, 0 if is_urgent or not was_connected else PACE_S)

    async def _hear_pool(self, key: Ref, peer: Peer, target: str) -> None:
        address = self.cluster.address(key.namespace, target)
        async for response in self.peers.watch_pool(address):
            self.book.hear(peer.uid, peer.place, response)
            self.tell(key, PACE_S)
