"""How many Jobs of a namespace's checkpoints are there at a time, and whose turn it is."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from etude.operator import names
from etude.operator.actions import Action, Apply, Delete
from etude.operator.clock import seconds
from etude.operator.cluster.api import Cluster
from etude.operator.cluster.controllers import JOB_COMPLETE, JOB_FAILED
from etude.operator.failures import CRASHES, PULL_FAILURES, trouble, unschedulable
from etude.operator.manifests import Manifest, Ref, is_deleting, is_true, labels, ref, uid

MAX_JOBS = 4
"""Of a namespace at a time: a controller that comes back tells of all that lies in the store."""
UNPLACED_S = 60.0
"""So long a Job may wait for a machine while others wait for its place: somebody may add one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Those of one namespace."""

    taken: int = 0
    """Jobs that work, or begin to as soon as a machine takes them."""
    unplaced: tuple[Manifest, ...] = ()
    """Those of them that no machine takes."""

    @property
    def is_free(self) -> bool:
        """Whether one more may begin."""
        return self.taken < MAX_JOBS

    def given_up(self, now_s: float) -> Manifest | None:
        """The Job that has to make room for another, if one has waited for a machine for long.

        All of them count, or a full cluster would get one for each checkpoint; none keeps its place
        for ever, or four that are too large for any machine would have nothing be verified.
        """
        oldest = min(self.unplaced, key=_born_s, default=None)
        return None if oldest is None or now_s - _born_s(oldest) < UNPLACED_S else oldest


@dataclass(slots=True)
class Underway:
    """What passes are doing to Jobs at this moment: of that no cache tells yet."""

    _made: set[Ref] = field(default_factory=set)
    _ended: set[str] = field(default_factory=set)
    """By uid."""

    @contextlib.contextmanager
    def noted(self, actions: Sequence[Action]) -> Iterator[None]:
        """Keep the places of what is made while that lasts, however it ends."""
        applied = (each.manifest for each in actions if isinstance(each, Apply))
        made = {ref(manifest) for manifest in applied if _is_ours(manifest)}
        ended = {each.uid for each in actions if isinstance(each, Delete)}
        self._made |= made
        self._ended |= ended
        try:
            yield
        finally:
            self._made -= made
            self._ended -= ended

    def places(self, cluster: Cluster, namespace: str) -> Places:
        """Those that are taken now."""
        there = (job for job in cluster.every("Job") if ref(job).namespace == namespace)
        begun = {ref(job): job for job in there if _is_begun(cluster, job)}
        coming = {key for key in self._made if key.namespace == namespace}
        return Places(
            taken=len(begun.keys() | coming),
            unplaced=tuple(
                job
                for job in begun.values()
                if not is_deleting(job)
                and uid(job) not in self._ended
                and unschedulable(cluster.owned(uid(job)))
            ),
        )


def _is_ours(manifest: Manifest) -> bool:
    return manifest["kind"] == "Job" and names.CHECKPOINT in labels(manifest)


def _is_begun(cluster: Cluster, job: Manifest) -> bool:
    """Whether it works, or will without anybody's help."""
    is_over = is_true(job, JOB_COMPLETE) or is_true(job, JOB_FAILED)
    if not _is_ours(job) or is_over:
        return False
    # What waits for a Secret that nobody makes must not keep all others waiting.
    return not trouble(cluster.owned(uid(job)), PULL_FAILURES | CRASHES)


def _born_s(job: Manifest) -> float:
    return seconds(job["metadata"]["creationTimestamp"])
