"""Job slots: limit of concurrent checkpoint Jobs in a namespace."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from etude.operator import names
from etude.operator.actions import Action, Apply, Delete
from etude.operator.clock import parse_rfc3339
from etude.operator.kube.interface import Cluster
from etude.operator.kube.workload_controllers import JOB_COMPLETE, JOB_FAILED
from etude.operator.manifests import Manifest, Ref, is_deleting, is_true, labels, ref, uid
from etude.operator.pod_failures import (
    CRASHES,
    PULL_FAILURES,
    unschedulable_message,
    waiting_message,
)

MAX_JOBS = 4
"""Concurrent Jobs of a namespace: a restarted controller reports every checkpoint of the store."""
UNSCHEDULABLE_S = 60.0
"""Time that an unschedulable Job keeps its slot while others wait: a node may be added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSlots:
    """Job slots of one namespace."""

    taken: int = 0
    """Jobs that run, or will once a node takes them."""
    unschedulable: tuple[Manifest, ...] = ()
    """The unschedulable ones of them."""

    @property
    def is_free(self) -> bool:
        """One more Job may start."""
        return self.taken < MAX_JOBS

    def expired_job(self, now_s: float) -> Manifest | None:
        """The Job that must free its slot, if one has been unschedulable for long.

        Unschedulable Jobs hold slots, or a full cluster would get a Job for each checkpoint; none
        holds its slot for ever, or four that are too large for any node would block all others.
        """
        oldest = min(self.unschedulable, key=_created_s, default=None)
        return None if oldest is None or now_s - _created_s(oldest) < UNSCHEDULABLE_S else oldest


@dataclass(slots=True)
class PendingJobs:
    """Jobs that passes are creating or deleting now, which no cache shows yet."""

    _made: set[Ref] = field(default_factory=set)
    _ended: set[str] = field(default_factory=set)
    """By uid."""

    @contextlib.contextmanager
    def track(self, actions: Sequence[Action]) -> Iterator[None]:
        """Count the Jobs of these actions while they are performed."""
        applied = (each.manifest for each in actions if isinstance(each, Apply))
        created = {ref(manifest) for manifest in applied if _is_ours(manifest)}
        ended = {each.uid for each in actions if isinstance(each, Delete)}
        self._made |= created
        self._ended |= ended
        try:
            yield
        finally:
            self._made -= created
            self._ended -= ended

    def job_slots(self, cluster: Cluster, namespace: str) -> JobSlots:
        """Slots in use now."""
        there = (job for job in cluster.list_objects("Job") if ref(job).namespace == namespace)
        begun = {ref(job): job for job in there if _holds_slot(cluster, job)}
        coming = {key for key in self._made if key.namespace == namespace}
        return JobSlots(
            taken=len(begun.keys() | coming),
            unschedulable=tuple(
                job
                for job in begun.values()
                if not is_deleting(job)
                and uid(job) not in self._ended
                and unschedulable_message(cluster.list_owned(uid(job)))
            ),
        )


def _is_ours(manifest: Manifest) -> bool:
    return manifest["kind"] == "Job" and names.CHECKPOINT in labels(manifest)


def _holds_slot(cluster: Cluster, job: Manifest) -> bool:
    """The Job runs, or will without intervention."""
    is_over = is_true(job, JOB_COMPLETE) or is_true(job, JOB_FAILED)
    if not _is_ours(job) or is_over:
        return False
    # A Job that waits for a missing Secret must not block all others.
    return not waiting_message(cluster.list_owned(uid(job)), PULL_FAILURES | CRASHES)


def _created_s(job: Manifest) -> float:
    return parse_rfc3339(job["metadata"]["creationTimestamp"])
