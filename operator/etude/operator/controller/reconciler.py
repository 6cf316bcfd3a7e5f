"""Reconciler: one pass over one object observes, decides, acts and writes the status."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from pydantic import ValidationError

from etude.common.api.checkpoint.status import CheckpointStatus
from etude.common.api.kinds import Checkpoint, EnvPool, Resource, RLRun
from etude.common.api.pool.status import EnvPoolStatus
from etude.common.api.run import lifecycle
from etude.common.api.run.status import RLRunStatus, Status
from etude.operator import names, pod_failures, tracing
from etude.operator.actions import (
    Action,
    Adopt,
    Apply,
    DealtWith,
    Decision,
    Delete,
    Finalizers,
    Fulfil,
    Moment,
    Note,
    Order,
    Tell,
    Vacate,
)
from etude.operator.builders import run as desired
from etude.operator.builders.addresses import address
from etude.operator.builders.run import Platform
from etude.operator.checkpoints import decide as checkpoints
from etude.operator.checkpoints.job_slots import Underway
from etude.operator.clock import Clock
from etude.operator.controller import object_metrics, unreadable_status
from etude.operator.controller.drain import vacate
from etude.operator.controller.last_applied import Outcomes
from etude.operator.controller.object_metrics import Measures
from etude.operator.controller.rejections import Refusal, Refusals, aim
from etude.operator.controller.status_writer import StatusWriter
from etude.operator.kube.interface import Cluster, NameTakenError, RefusedError
from etude.operator.manifests import Manifest, Ref, is_deleting, is_true, labels, ref, uid
from etude.operator.pools import decide as pools
from etude.operator.pools import observe as pool_seen
from etude.operator.pools.size import Sizers
from etude.operator.remotes.clients import PeerError, Peers
from etude.operator.remotes.followers import Followers, Peer
from etude.operator.remotes.report_store import Position, ReportBook
from etude.operator.runs import decide as runs
from etude.operator.runs import observe
from etude.operator.runs.lifecycle import transitions

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Resource)
S = TypeVar("S", bound=Status)

REPEAT_ORDER_S = 10.0
"""A command without effect is sent again after this."""


@dataclass(slots=True)
class Reconciler:
    """Reconciles all kinds over one cluster."""

    cluster: Cluster
    book: ReportBook
    peers: Peers
    platform: Platform
    clock: Clock
    followers: Followers
    writer: StatusWriter
    sizers: Sizers = field(default_factory=Sizers)
    measures: Measures = field(default_factory=Measures)
    _uids: dict[Ref, str] = field(default_factory=dict)
    _refusals: Refusals = field(default_factory=Refusals)
    _outcomes: Outcomes = field(default_factory=Outcomes)
    _ordered: dict[str, float] = field(default_factory=dict)
    _underway: Underway = field(default_factory=Underway)

    async def reconcile(self, key: Ref) -> float | None:
        """Make one pass over an object; safe to repeat at any moment.

        Returns:
            Seconds until the next pass even without an event; None if none is needed.

        Raises:
            ClusterError: a write failed; retry.
        """
        manifest = self.cluster.get(key)
        known = self._uids.get(key)
        if known is not None and (manifest is None or uid(manifest) != known):
            self._forget(key, known)
        if manifest is None:
            return None
        self._uids[key] = uid(manifest)
        match key.kind:
            case "RLRun":
                return await self._parsed(manifest, RLRun, RLRunStatus, self._run)
            case "EnvPool":
                return await self._parsed(manifest, EnvPool, EnvPoolStatus, self._pool)
            case _:
                return await self._parsed(manifest, Checkpoint, CheckpointStatus, self._checkpoint)

    def retire(self) -> None:
        """Forget everything: another operator acts from now on, and exports the metrics."""
        self.followers.leave_all()
        for key, known in list(self._uids.items()):
            self._forget(key, known)

    async def _parsed(
        self,
        manifest: Manifest,
        kind: type[R],
        status: type[S],
        decide: Callable[[R, Manifest], Decision[S]],
    ) -> float | None:
        try:
            resource = kind.understood(manifest)
        except ValidationError as error:
            found = unreadable_status.told(manifest, status, error, self._now())
            if isinstance(found, Note):
                await self.writer.record(manifest, found)
                return None
            return await self.writer.write(manifest, found)
        return await self._perform(manifest, decide(resource, manifest))

    def _run(self, run: RLRun, manifest: Manifest) -> Decision[RLRunStatus]:
        if run.spec.managed_by != lifecycle.OPERATOR:
            self.followers.leave_object(run.metadata.uid)
            return Decision(status=run.status)
        reported = run.status.reported
        # A restarted operator asks for the reports after this position.
        self.book.dealt_with(run.metadata.uid, Position(reported.epoch, reported.sequence))
        attempt = transitions.attempts_of(run).get(names.TRAINER, 0)
        pods = observe.role_pods(self.cluster, run).get(names.TRAINER, ())
        target = address(run, names.TRAINER)
        peer = Peer(uid(manifest))
        controllers = [pod for pod in pods if labels(pod).get(names.RAY_NODE) != "worker"]
        self._follow(manifest, peer, target, pod_failures.of_attempt(controllers, attempt))
        about = run.metadata.uid
        problem, refused = self._refusals.fact(about), self._refusals.aims(about)
        found = observe.gather(self.cluster, self.book, run, problem, refused)
        if run.spec.suspend and run.status.intent is None and found.is_gone:
            self.book.ended(run.metadata.uid)
        self.measures.run(run)
        return runs.decide(run, found, self._now(), self.platform)

    def _pool(self, pool: EnvPool, manifest: Manifest) -> Decision[EnvPoolStatus]:
        problem = self._refusals.fact(pool.metadata.uid)
        found = pool_seen.gather(self.cluster, self.book, pool, problem)
        for place, target in enumerate(desired.brokers(pool.metadata.name, pool.spec.brokers)):
            pods = [pod for pod in found.brokers if names.ordinal(pod["metadata"]["name"]) == place]
            self._follow(manifest, Peer(uid(manifest), place), target, pods)
        now = self._now()
        if pool.status.resolved is not None:
            sizer = self.sizers.of(pool)
            size = sizer.size(pool, found.nodes, found.report, found.asking, now)
            found = replace(found, size=size)
        self.measures.pool(pool, now)
        return pools.decide(pool, found, now, self.platform)

    def _checkpoint(self, checkpoint: Checkpoint, manifest: Manifest) -> Decision[CheckpointStatus]:
        problem = self._refusals.fact(uid(manifest))
        found = checkpoints.gather(self.cluster, checkpoint, problem, self._underway)
        return checkpoints.decide(checkpoint, found, self._now(), self.platform)

    async def _perform(self, manifest: Manifest, decision: Decision[S]) -> float | None:
        about = uid(manifest)
        tracing.decided(len(decision.actions))
        # Nothing was awaited since the decision: no other pass has seen the same slot free.
        with self._underway.noted(decision.actions):
            refused = await self._act_all(manifest, decision.actions)
        if refused:
            if self._refusals.remember(manifest, refused):
                return 0.0
            left = await self.writer.write(manifest, decision.status)
            again_s = self._refusals.again_s(about, self.clock.monotonic_s())
            return again_s if left is None else left
        had_problem = self._refusals.end(about)
        passing = decision.is_passing
        left = await self.writer.write(manifest, decision.status, is_passing=passing)
        if left is not None and decision.requeue_after_s == 0.0:
            return left  # the next pass acts once this is written
        waits = [wait for wait in (decision.requeue_after_s, left) if wait is not None]
        # Only the next pass writes the acknowledged position.
        dealt = any(isinstance(action, DealtWith) for action in decision.actions)
        return 0.0 if had_problem or dealt else min(waits, default=None)

    async def _act_all(self, about: Manifest, actions: Sequence[Action]) -> list[Refusal]:
        """Carry out the actions; returns the rejections.

        After a rejection nothing is created, since it may need the rejected object, and no report
        is acknowledged: the next pass retries both.
        """
        refused: list[Refusal] = []
        for action in actions:
            is_new = isinstance(action, Apply) and self.cluster.get(ref(action.manifest)) is None
            if refused and (is_new or isinstance(action, DealtWith)):
                continue
            refusal = await self._attempt(about, action)
            if refusal is not None:
                refused.append(refusal)
        return refused

    async def _attempt(self, about: Manifest, action: Action) -> Refusal | None:
        """Carry out an action, unless it was rejected recently; returns its rejection."""
        key, now_s = aim(action), self.clock.monotonic_s()
        live = None if key is None else self.cluster.get(key)
        known = self._refusals.lately(uid(about), action, live, now_s)
        if known is not None:
            return known
        try:
            await self._act(about, action)
        except (NameTakenError, RefusedError) as error:
            refusal = Refusal(action, error)
            self._refusals.tried(uid(about), refusal, live, now_s)
            return refusal
        return None

    async def _act(self, about: Manifest, action: Action) -> None:
        match action:
            case Apply():
                await self._apply(about, action)
            case Delete():
                await self.cluster.delete(action.ref, uid=action.uid, grace_s=action.grace_s)
            case Finalizers() | Adopt() | Fulfil() | Tell():
                await self._mark(action)
            case Order():
                await self._order(about, action)
            case Vacate():
                await vacate(self.cluster, self.peers, about, action)
            case Note():
                await self.writer.record(about, action)
            case DealtWith():
                self.book.dealt_with(uid(about), action.position)

    async def _apply(self, about: Manifest, action: Apply) -> None:
        live = self.cluster.get(ref(action.manifest))
        if live is not None and self._outcomes.stands(uid(about), action.manifest, live):
            return
        made = await self.cluster.apply(action.manifest, manager=action.manager)
        self._outcomes.remember(uid(about), action.manifest, made)
        object_metrics.applied(action.manifest)

    async def _mark(self, action: Finalizers | Adopt | Fulfil | Tell) -> None:
        """Write to an object that others own or watch, as it was observed."""
        match action:
            case Tell():
                await self.cluster.replace_status(action.seen, action.status)
            case Finalizers():
                await self.cluster.set_finalizers(action.seen, action.finalizers)
            case Adopt():
                await self.cluster.adopt(action.seen, action.metadata)
            case Fulfil():
                asked = self.cluster.get(action.ref)
                if asked is not None and uid(asked) == action.uid:
                    # Not through the status writer: a write that is held back here is lost.
                    await self.cluster.replace_status(asked, action.status.to_json())

    async def _order(self, about: Manifest, order: Order) -> None:
        """Send a command, unless it was sent recently; a lost one is sent again."""
        ordered = f"{order.request.command_id}@{self.book.run(uid(about)).done.epoch}"
        now = self.clock.monotonic_s()
        if now - self._ordered.get(ordered, float("-inf")) < REPEAT_ORDER_S:
            return
        self._ordered = {k: at for k, at in self._ordered.items() if now - at < REPEAT_ORDER_S}
        self._ordered[ordered] = now
        namespace = about["metadata"].get("namespace", "default")
        try:
            await self.peers.order(self.cluster.address(namespace, order.target), order.request)
        except PeerError as error:
            log.warning("command %s was not accepted: %s", order.request.command_id, error)

    def _follow(
        self, manifest: Manifest, peer: Peer, target: str, pods: Sequence[Manifest]
    ) -> None:
        """Follow the reports of the ready pod, if there is one."""
        up = [pod for pod in pods if is_true(pod, "Ready") and not is_deleting(pod)]
        if up:
            self.followers.follow(ref(manifest), peer, target, pod_uid=uid(up[0]))
        else:
            self.followers.leave(peer)

    def _forget(self, key: Ref, gone_uid: str) -> None:
        self.followers.leave_object(gone_uid)
        self.book.forget(gone_uid)
        self.writer.forget(gone_uid)
        self._refusals.forget(gone_uid)
        self._outcomes.forget(gone_uid)
        del self._uids[key]
        self.sizers.forget(gone_uid)
        self.measures.forget(key)

    def _now(self) -> Moment:
        return Moment(self.clock.wall_s(), self.clock.monotonic_s())
