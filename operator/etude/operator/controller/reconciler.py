"""Reconciler: one pass over one object observes, decides, acts and writes the status."""

from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import ValidationError

from etude.common.api.meta import ObjectMeta
from etude.common.api.status_types import StatusModel
from etude.operator import tracing
from etude.operator.actions import AckReport, ClockReading, Decision, RecordEvent
from etude.operator.builders.platform import Platform
from etude.operator.clock import Clock, rfc3339
from etude.operator.conditions import ACCEPTED, false_condition, merge_conditions
from etude.operator.controller.executor import ActionExecutor
from etude.operator.controller.rejections import Rejections
from etude.operator.controller.status_writer import StatusWriter
from etude.operator.kind import KindContext, KindReconciler, PassInput
from etude.operator.kind_registry import KINDS, KINDS_BY_NAME
from etude.operator.kube.interface import Cluster
from etude.operator.manifests import Manifest, Ref, uid
from etude.operator.reasons import Reason
from etude.operator.remotes.clients import RemoteClient
from etude.operator.remotes.followers import Followers
from etude.operator.remotes.report_store import ReportStore

S = TypeVar("S", bound=StatusModel)


@dataclass(slots=True)
class Reconciler:
    """Reconciles all kinds over one cluster."""

    cluster: Cluster
    reports: ReportStore
    client: RemoteClient
    platform: Platform
    clock: Clock
    followers: Followers
    writer: StatusWriter
    kinds: dict[str, KindReconciler[Any, Any]] = field(init=False)
    """By name of the kind."""
    _uids: dict[Ref, str] = field(default_factory=dict)
    _rejections: Rejections = field(default_factory=Rejections)
    _executor: ActionExecutor = field(init=False)

    def __post_init__(self) -> None:
        context = KindContext(
            cluster=self.cluster,
            reports=self.reports,
            followers=self.followers,
        )
        self.kinds = {kind.name: kind.reconciler(context) for kind in KINDS}
        self._executor = ActionExecutor(
            cluster=self.cluster,
            reports=self.reports,
            client=self.client,
            clock=self.clock,
            events=self.writer.events,
            rejections=self._rejections,
            record_apply=lambda about, child: self.kinds[about["kind"]].record_apply(child),
        )

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
        return await self._pass(manifest)

    def reset(self) -> None:
        """Forget everything: another operator acts from now on, and exports the metrics."""
        self.followers.unfollow_all()
        for key, known in list(self._uids.items()):
            self._forget(key, known)

    async def _pass(self, manifest: Manifest) -> float | None:
        kind = KINDS_BY_NAME[manifest["kind"]]
        now = ClockReading(self.clock.wall_s(), self.clock.monotonic_s())
        try:
            resource = kind.model.parse_known_fields(manifest)
        except ValidationError as error:
            report = unreadable_status(manifest, kind.status, error, now)
            if isinstance(report, RecordEvent):
                await self.writer.events.record(manifest, report)
                return None
            return await self.writer.write(manifest, report)
        inputs = PassInput(
            now=now,
            platform=self.platform,
            problem=self._rejections.condition(uid(manifest)),
            rejected=self._rejections.rejected_objects(uid(manifest)),
        )
        decision = self.kinds[kind.name].decide(resource, manifest, inputs)
        return await self._perform(manifest, decision)

    async def _perform(self, manifest: Manifest, decision: Decision[S]) -> float | None:
        about = uid(manifest)
        tracing.record_num_actions(len(decision.actions))
        with self.kinds[manifest["kind"]].reserve(decision.actions):
            rejections = await self._executor.carry_out(manifest, decision.actions)
        if rejections:
            if self._rejections.record(manifest, rejections):
                return 0.0
            left = await self.writer.write(manifest, decision.status)
            again_s = self._rejections.retry_after_s(about, self.clock.monotonic_s())
            return again_s if left is None else left
        had_problem = self._rejections.clear(about)
        passing = decision.is_transient
        left = await self.writer.write(manifest, decision.status, is_transient=passing)
        if left is not None and decision.requeue_after_s == 0.0:
            return left  # the next pass acts once this is written
        waits = [wait for wait in (decision.requeue_after_s, left) if wait is not None]
        # Only the next pass writes the acknowledged position.
        dealt = any(isinstance(action, AckReport) for action in decision.actions)
        return 0.0 if had_problem or dealt else min(waits, default=None)

    def _forget(self, key: Ref, gone_uid: str) -> None:
        self.followers.unfollow_object(gone_uid)
        self.reports.forget(gone_uid)
        self.writer.forget(gone_uid)
        self._rejections.forget(gone_uid)
        self._executor.forget(gone_uid)
        self.kinds[key.kind].forget(key, gone_uid)
        del self._uids[key]


def unreadable_status(
    manifest: Manifest, kind: type[S], error: ValidationError, now: ClockReading
) -> S | RecordEvent:
    """The status with the validation error under Accepted; all other fields stay.

    A finished run stays finished although its spec is unreadable: it must not start again once it
    can be read. A status with fields of a newer operator stays untouched for that operator; an
    Event reports it instead.

    Args:
        manifest: the object.
        kind: class of its status.
        error: the validation error of the object.
        now: both clocks.
    """
    try:
        known = kind.parse_known_fields(manifest.get("status", {}))
    except ValidationError as of_status:
        return _newer_status_event(_first(of_status))
    before = getattr(known, "conditions", ())
    facts = merge_conditions(
        [false_condition(ACCEPTED, Reason.INVALID_SPEC, _first(error))],
        before,
        generation=ObjectMeta.model_validate(manifest["metadata"]).generation,
        now=rfc3339(now.wall_s),
    )
    others = [each for each in before if each.type != ACCEPTED]
    phase = getattr(known, "phase", "") if others else "Pending"
    return known.model_copy(update={"conditions": (*facts, *others), "phase": phase})


def _newer_status_event(trouble: str) -> RecordEvent:
    message = (
        f"this operator cannot read status.{trouble}; it leaves the object and its children"
        " unchanged. Install the release that wrote the status"
    )
    return RecordEvent(
        name="unreadable-status", reason=Reason.INVALID_STATUS, message=message, is_warning=True
    )


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
