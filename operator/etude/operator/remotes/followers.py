"""Followers: reports of every ready controller, broker and feedback service."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.common.backoff import Backoff
from etude.operator.kube.interface import Cluster
from etude.operator.manifests import Manifest, Ref, is_deleting, is_true, uid
from etude.operator.remotes.clients import RemoteClient, RemoteError
from etude.operator.remotes.report_store import ReportStore

log = logging.getLogger(__name__)

FIGURES_DELAY_S = 1.0
"""Delay of a pass for reports that only change figures; all others trigger one immediately."""
FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 5.0
MAX_UNACKNOWLEDGED = 1_000
"""Most unacknowledged reports of a controller; its stream is restarted after more."""

Enqueue = Callable[[Ref, float], None]
"""Receives the object to reconcile, and a delay in seconds."""


class ReportSource(NamedTuple):
    """The source of reports about an object."""

    uid: str
    ordinal: int = 0
    """Ordinal of a pool's broker."""


class FollowedPod(NamedTuple):
    """A followed pod and the task that reads its stream."""

    pod_uid: str
    task: asyncio.Task[None]


@dataclass(slots=True)
class Followers:
    """One task per controller, broker or feedback service, in a running task group."""

    cluster: Cluster
    reports: ReportStore
    client: RemoteClient
    enqueue: Enqueue
    tasks: asyncio.TaskGroup
    _following: dict[ReportSource, FollowedPod] = field(default_factory=dict)

    def follow(self, key: Ref, peer: ReportSource, target: str, *, pod_uid: str) -> None:
        """Follow a peer; a new pod of the same name restarts its stream."""
        known = self._following.get(peer)
        if known is not None and known.pod_uid != pod_uid:
            self.unfollow(peer)
        if peer not in self._following:
            listening = self._follow(key, peer, target)
            task = self.tasks.create_task(listening, name=f"follow-{key.name}")
            self._following[peer] = FollowedPod(pod_uid, task)
            if key.kind == "RLRun":
                self.reports.record_new_controller(peer.uid)

    def follow_ready_pod(
        self, key: Ref, peer: ReportSource, target: str, pods: Sequence[Manifest]
    ) -> None:
        """Follow the first ready pod of these; stop following if there is none."""
        ready = [pod for pod in pods if is_true(pod, "Ready") and not is_deleting(pod)]
        if ready:
            self.follow(key, peer, target, pod_uid=uid(ready[0]))
        else:
            self.unfollow(peer)

    def unfollow(self, peer: ReportSource) -> None:
        """Stop following a peer whose pod is not ready."""
        known = self._following.pop(peer, None)
        if known is not None:
            known.task.cancel()
            if peer.uid in self.reports.runs:
                self.reports.record_disconnected(peer.uid)
            if peer.uid in self.reports.pools:
                self.reports.pools[peer.uid].by_broker.pop(peer.ordinal, None)
            self.reports.routes.pop(peer.uid, None)

    def unfollow_object(self, uid: str) -> None:
        for peer in [peer for peer in self._following if peer.uid == uid]:
            self.unfollow(peer)

    def unfollow_all(self) -> None:
        for peer in list(self._following):
            self.unfollow(peer)

    async def _follow(self, key: Ref, peer: ReportSource, target: str) -> None:
        """Read the stream until cancelled; a broken one is reopened with backoff."""
        hear = {
            "RLRun": self._read_controller,
            "EnvPool": self._read_broker,
            "PolicyRoute": self._read_release,
        }[key.kind]
        backoff = Backoff(FIRST_DELAY_S, LONGEST_DELAY_S)
        while True:
            try:
                await hear(key, peer, target)
                backoff.reset()
            except RemoteError as error:
                log.info("%s/%s: %s", key.namespace, key.name, error)
                if self._record_end(key, peer):
                    backoff.reset()
            except Exception:
                # A bug with one peer must not end the operator.
                log.exception("%s/%s cannot be followed", key.namespace, key.name)
                self._record_end(key, peer)
            await asyncio.sleep(backoff.next_s())

    def _record_end(self, key: Ref, peer: ReportSource) -> bool:
        """Record the end of a stream; returns true if it was open and a run's."""
        if key.kind != "RLRun" or not self.reports.run(peer.uid).is_connected:
            return False
        self.reports.record_disconnected(peer.uid)
        self.enqueue(key, 0)
        return True

    async def _read_controller(self, key: Ref, peer: ReportSource, target: str) -> None:
        uid = peer.uid
        after = self.reports.run(uid).acknowledged
        address = self.cluster.address(key.namespace, target)
        async for response in self.client.watch_run(address, after):
            if response.run_uid != uid:
                raise RemoteError(f"{address} serves run {response.run_uid}, not {uid}")
            if len(self.reports.run(uid).pending) >= MAX_UNACKNOWLEDGED:
                raise RemoteError(
                    f"{address} has sent {MAX_UNACKNOWLEDGED} reports that are not acknowledged yet"
                )
            was_connected = self.reports.run(uid).is_connected
            if not was_connected:
                self.reports.record_connected(uid)
            is_urgent = self.reports.add_controller_message(uid, response)
            self.enqueue(key, 0 if is_urgent or not was_connected else FIGURES_DELAY_S)

    async def _read_broker(self, key: Ref, peer: ReportSource, target: str) -> None:
        address = self.cluster.address(key.namespace, target)
        async for response in self.client.watch_pool(address):
            self.reports.add_broker_report(peer.uid, peer.ordinal, response)
            self.enqueue(key, FIGURES_DELAY_S)

    async def _read_release(self, key: Ref, peer: ReportSource, target: str) -> None:
        address = self.cluster.address(key.namespace, target)
        async for response in self.client.watch_release(address):
            if self.reports.routes.get(peer.uid) != response:
                self.reports.routes[peer.uid] = response
                self.enqueue(key, 0)
