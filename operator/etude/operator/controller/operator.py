"""The operator over any cluster: watch events become keys, workers reconcile them."""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from etude.operator import metrics, tracing
from etude.operator.builders.platform import Platform
from etude.operator.clock import Clock
from etude.operator.controller.event_recorder import EventRecorder
from etude.operator.controller.pod_startup import PodStartups
from etude.operator.controller.reconciler import Reconciler
from etude.operator.controller.status_writer import StatusDebounce, StatusWriter
from etude.operator.controller.workqueue import WorkQueue
from etude.operator.kind_registry import KINDS, KINDS_BY_NAME
from etude.operator.kube.interface import ApiRejectedError, Cluster, ClusterError, ConflictError
from etude.operator.manifests import Manifest, Ref, ref
from etude.operator.remotes.clients import RemoteClient
from etude.operator.remotes.followers import Followers
from etude.operator.remotes.report_store import ReportStore


@dataclass(slots=True)
class ReferenceIndex:
    """Objects by the objects that they name.

    Pools change too often to search all runs each time.
    """

    _referrers: defaultdict[Ref, set[Ref]] = field(default_factory=lambda: defaultdict(set))
    _references: dict[Ref, frozenset[Ref]] = field(default_factory=dict)
    """Objects that each object names."""

    def index(self, key: Ref, references: Iterable[Ref]) -> None:
        self.forget(key)
        targets = frozenset(references)
        if targets:
            self._references[key] = targets
        for target in targets:
            self._referrers[target].add(key)

    def forget(self, key: Ref) -> None:
        for target in self._references.pop(key, frozenset()):
            self._referrers[target].discard(key)
            if not self._referrers[target]:
                del self._referrers[target]

    def referrers(self, target: Ref) -> Sequence[Ref]:
        return sorted(self._referrers.get(target, ()))


log = logging.getLogger(__name__)

RESYNC_S = 600.0
"""Interval at which every object is reconciled even without an event."""


@dataclass(slots=True)
class Operator:
    """Workqueue and workers; only run() acts."""

    cluster: Cluster
    reconciler: Reconciler
    queue: WorkQueue
    num_workers: int = 24
    """A pass mostly waits for the API server: a dozen sequential requests. With 8 workers a slow
    API server bounded the runs per second."""
    references: ReferenceIndex = field(default_factory=ReferenceIndex)
    pod_startups: PodStartups = field(default_factory=PodStartups)

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                self.enqueue_all()
                group.create_task(self._resync(), name="resync")
                for number in range(self.num_workers):
                    group.create_task(self._work(), name=f"worker-{number}")
        finally:
            self.reconciler.reset()

    def on_change(self, manifest: Manifest) -> None:
        self._index(manifest, is_deleted=self.cluster.get(ref(manifest)) is None)
        for key in self.affected_keys(manifest):
            self.queue.add(key)

    def _index(self, manifest: Manifest, *, is_deleted: bool) -> None:
        kind = KINDS_BY_NAME.get(manifest["kind"])
        if kind is not None and is_deleted:
            self.references.forget(ref(manifest))
        elif kind is not None:
            self.references.index(ref(manifest), kind.references(manifest))
        elif manifest["kind"] == "Pod" and is_deleted:
            self.pod_startups.forget(manifest)
        elif manifest["kind"] == "Pod":
            self.pod_startups.observe(manifest)

    def affected_keys(self, manifest: Manifest) -> list[Ref]:
        key = ref(manifest)
        keys = [key] if key.kind in KINDS_BY_NAME else []
        # The owner of a child is of the last kind that its labels name: a pool's own pods also have
        # the label of the pool's run.
        for kind in reversed(KINDS):
            owner = kind.owner_of(manifest)
            if owner is not None:
                keys.append(Ref(kind.name, key.namespace, owner))
                break
        return [*keys, *self.references.referrers(key)]

    def enqueue_all(self) -> None:
        for manifest in _own_objects(self.cluster):
            self.queue.add(ref(manifest))

    async def _resync(self) -> None:
        while True:
            await asyncio.sleep(RESYNC_S)
            self.enqueue_all()

    async def _work(self) -> None:
        while True:
            key = await self.queue.take()
            try:
                await self.reconcile_key(key)
            except asyncio.CancelledError:
                # The queue outlives a term of leadership: the next term must find the key free.
                self.queue.retry(key)
                raise

    async def reconcile_key(self, key: Ref) -> None:
        with metrics.RECONCILE_SECONDS.labels(key.kind).time(), tracing.trace_reconcile(key):
            result = await self._pass(key)
            tracing.record_result(result)
        metrics.RECONCILES.labels(key.kind, result).inc()

    async def _pass(self, key: Ref) -> str:
        """Reconcile an object and queue its key again as needed; returns the result for metrics."""
        try:
            again_s = await self.reconciler.reconcile(key)
        except ConflictError:
            # The cache receives the newer state soon.
            self.queue.retry(key)
            return "conflict"
        except (ClusterError, ApiRejectedError) as error:
            # A status is rejected by a schema or a missing right, which an installation may fix.
            delay_s = self.queue.retry(key)
            log.warning("%s %s: %s; retries in %.1f s", key.kind, key.name, error, delay_s)
            return "error"
        except Exception:
            # A bug with one object must not stop the work on the others.
            delay_s = self.queue.retry(key)
            log.exception("%s %s: retries in %.1f s", key.kind, key.name, delay_s)
            return "bug"
        self.queue.mark_done(key)
        if again_s is not None:
            self.queue.add_after(key, again_s)
        return "ok"


def has_new_spec(cluster: Cluster, key: Ref) -> bool:
    """Return true if the spec has changed since the status was written.

    Such an object is urgent: a user waits for it.
    """
    manifest = cluster.get(key)
    if manifest is None:
        return False
    observed = manifest.get("status", {}).get("observedGeneration")
    return bool(observed != manifest["metadata"].get("generation"))


def _own_objects(cluster: Cluster) -> Iterator[Manifest]:
    for kind in KINDS:
        yield from cluster.list_objects(kind.name)


@contextlib.asynccontextmanager
async def open_operator(
    cluster: Cluster,
    peers: RemoteClient,
    platform: Platform,
    clock: Clock,
    *,
    instance: str,
    debounce: StatusDebounce,
) -> AsyncIterator[Operator]:
    """An operator over a cluster, with its followers, which end with the block."""
    queue = WorkQueue(is_urgent=partial(has_new_spec, cluster))
    book = ReportStore(clock)
    async with asyncio.TaskGroup() as tasks:
        followers = Followers(cluster, book, peers, queue.add_after, tasks)
        reconciler = Reconciler(
            cluster=cluster,
            reports=book,
            client=peers,
            platform=platform,
            clock=clock,
            followers=followers,
            writer=StatusWriter(cluster, clock, EventRecorder(cluster, clock, instance), debounce),
        )
        made = Operator(cluster, reconciler, queue)
        for manifest in _own_objects(cluster):
            made.references.index(
                ref(manifest), KINDS_BY_NAME[manifest["kind"]].references(manifest)
            )
        cluster.subscribe(made.on_change)
        try:
            yield made
        finally:
            followers.unfollow_all()
