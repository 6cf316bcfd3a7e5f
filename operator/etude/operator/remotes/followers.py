"""Followers: report streams of every ready controller and broker."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.operator.kube.interface import Cluster
from etude.operator.manifests import Manifest, Ref, is_deleting, is_true, uid
from etude.operator.remotes.clients import PeerError, Peers
from etude.operator.remotes.report_store import ReportBook

log = logging.getLogger(__name__)

PACE_S = 1.0
"""Delay of a pass for reports that only change figures; all others trigger one immediately."""
FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 5.0
MOST_HAPPENINGS = 1_000
"""Most unacknowledged reports of a controller; its stream is restarted after more."""

News = Callable[[Ref, float], None]
"""Receives the object to reconcile, and a delay in seconds."""


class Peer(NamedTuple):
    """The source of reports about an object."""

    uid: str
    place: int = 0
    """Ordinal of a pool's broker."""


class Following(NamedTuple):
    """A followed pod and the task that reads its stream."""

    pod_uid: str
    task: asyncio.Task[None]


@dataclass(slots=True)
class Followers:
    """One task per controller or broker, in a running task group."""

    cluster: Cluster
    book: ReportBook
    peers: Peers
    tell: News
    tasks: asyncio.TaskGroup
    _following: dict[Peer, Following] = field(default_factory=dict)

    def follow(self, key: Ref, peer: Peer, target: str, *, pod_uid: str) -> None:
        """Follow a peer; a new pod of the same name restarts its stream."""
        known = self._following.get(peer)
        if known is not None and known.pod_uid != pod_uid:
            self.leave(peer)
        if peer not in self._following:
            listening = self._follow(key, peer, target)
            task = self.tasks.create_task(listening, name=f"follow-{key.name}")
            self._following[peer] = Following(pod_uid, task)
            if key.kind == "RLRun":
                self.book.began(peer.uid)

    def follow_ready_pod(self, key: Ref, peer: Peer, target: str, pods: Sequence[Manifest]) -> None:
        """Follow the first ready pod of these; stop following if there is none."""
        ready = [pod for pod in pods if is_true(pod, "Ready") and not is_deleting(pod)]
        if ready:
            self.follow(key, peer, target, pod_uid=uid(ready[0]))
        else:
            self.leave(peer)

    def leave(self, peer: Peer) -> None:
        """Stop following a peer whose pod is not ready."""
        known = self._following.pop(peer, None)
        if known is not None:
            known.task.cancel()
            if peer.uid in self.book.runs:
                self.book.disconnected(peer.uid)
            if peer.uid in self.book.pools:
                self.book.pools[peer.uid].said.pop(peer.place, None)

    def leave_object(self, uid: str) -> None:
        """Stop following every peer of a run or pool."""
        for peer in [peer for peer in self._following if peer.uid == uid]:
            self.leave(peer)

    def leave_all(self) -> None:
        """Stop following all peers."""
        for peer in list(self._following):
            self.leave(peer)

    async def _follow(self, key: Ref, peer: Peer, target: str) -> None:
        """Read the stream until cancelled; a broken one is reopened with backoff."""
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
                # A bug with one peer must not end the operator.
                log.exception("%s/%s cannot be followed", key.namespace, key.name)
                self._break(key, peer)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)

    def _break(self, key: Ref, peer: Peer) -> bool:
        """Record the end of a stream; returns true if it was open and a run's."""
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
                raise PeerError(
                    f"{address} has sent {MOST_HAPPENINGS} reports that are not acknowledged yet"
                )
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
