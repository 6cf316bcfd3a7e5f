"""Action executor: carries out the actions of a decision, and collects rejections."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from etude.operator.actions import (
    Action,
    Adopt,
    Apply,
    DealtWith,
    Delete,
    Finalizers,
    Fulfil,
    Note,
    Order,
    Tell,
    Vacate,
)
from etude.operator.clock import Clock
from etude.operator.controller.drain import vacate
from etude.operator.controller.last_applied import Outcomes
from etude.operator.controller.rejections import Refusal, Refusals, aim
from etude.operator.controller.status_writer import StatusWriter
from etude.operator.kube.interface import Cluster, NameTakenError, RefusedError
from etude.operator.manifests import Manifest, ref, uid
from etude.operator.remotes.clients import PeerError, Peers
from etude.operator.remotes.report_store import ReportBook

log = logging.getLogger(__name__)

REPEAT_ORDER_S = 10.0
"""A command without effect is sent again after this."""


@dataclass(slots=True)
class ActionExecutor:
    """Carries out actions on a cluster and on remote controllers and brokers."""

    cluster: Cluster
    book: ReportBook
    peers: Peers
    clock: Clock
    writer: StatusWriter
    rejections: Refusals
    record_apply: Callable[[Manifest, Manifest], None]
    """Receives the object of the pass and each child that was created or changed."""
    _last_applied: Outcomes = field(default_factory=Outcomes)
    _sent: dict[str, float] = field(default_factory=dict)
    """Monotonic time at which each command was sent last."""

    async def carry_out(self, about: Manifest, actions: Sequence[Action]) -> list[Refusal]:
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
        known = self.rejections.lately(uid(about), action, live, now_s)
        if known is not None:
            return known
        try:
            await self._act(about, action)
        except (NameTakenError, RefusedError) as error:
            refusal = Refusal(action, error)
            self.rejections.tried(uid(about), refusal, live, now_s)
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
        if live is not None and self._last_applied.stands(uid(about), action.manifest, live):
            return
        made = await self.cluster.apply(action.manifest, manager=action.manager)
        self._last_applied.remember(uid(about), action.manifest, made)
        self.record_apply(about, action.manifest)

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
        if now - self._sent.get(ordered, float("-inf")) < REPEAT_ORDER_S:
            return
        self._sent = {k: at for k, at in self._sent.items() if now - at < REPEAT_ORDER_S}
        self._sent[ordered] = now
        namespace = about["metadata"].get("namespace", "default")
        try:
            await self.peers.order(self.cluster.address(namespace, order.target), order.request)
        except PeerError as error:
            log.warning("command %s was not accepted: %s", order.request.command_id, error)

    def forget(self, gone_uid: str) -> None:
        """Drop the state of a deleted object."""
        self._last_applied.forget(gone_uid)
