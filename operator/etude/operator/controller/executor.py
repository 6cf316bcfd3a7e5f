"""Action executor: carries out the actions of a decision, and collects rejections."""

import asyncio
import logging
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

from etude.operator.actions import (
    AckReport,
    Action,
    Adopt,
    Apply,
    CompleteRequest,
    Delete,
    DrainHosts,
    RecordEvent,
    SendCommand,
    SetFinalizers,
    UpdateBrokers,
    WriteStatus,
)
from etude.operator.clock import Clock
from etude.operator.controller.event_recorder import EventRecorder
from etude.operator.controller.last_applied import LastAppliedCache
from etude.operator.controller.rejections import Rejection, Rejections, target_of
from etude.operator.kube.interface import ApiRejectedError, Cluster, NameTakenError
from etude.operator.manifests import Manifest, ref, uid
from etude.operator.remotes.clients import HOLD_S, RemoteClient, RemoteError
from etude.operator.remotes.release_order import ReleaseOrder
from etude.operator.remotes.report_store import ReleaseAnswer, ReportStore

log = logging.getLogger(__name__)

DELETE_MARGIN_S = 3.0
"""A deletion may take effect this long after it was sent: the timeout of a write."""
RESEND_COMMAND_S = 10.0
"""A command without effect is sent again after this."""


@dataclass(slots=True)
class ActionExecutor:
    """Carries out actions on a cluster and on remote controllers and brokers."""

    cluster: Cluster
    reports: ReportStore
    client: RemoteClient
    clock: Clock
    events: EventRecorder
    rejections: Rejections
    record_apply: Callable[[Manifest, Manifest], None]
    """Receives the object of the pass and each child that was created or changed."""
    _last_applied: LastAppliedCache = field(default_factory=LastAppliedCache)
    _sent: dict[str, float] = field(default_factory=dict)
    """Monotonic time at which each command was sent last."""

    async def carry_out(self, about: Manifest, actions: Sequence[Action]) -> list[Rejection]:
        """Carry out the actions; returns the rejections.

        After a rejection nothing is created, since it may need the rejected object, and no report
        is acknowledged: the next pass retries both.
        """
        rejections: list[Rejection] = []
        for action in actions:
            is_new = isinstance(action, Apply) and self.cluster.get(ref(action.manifest)) is None
            if rejections and (is_new or isinstance(action, AckReport)):
                continue
            rejection = await self._attempt(about, action)
            if rejection is not None:
                rejections.append(rejection)
        return rejections

    async def _attempt(self, about: Manifest, action: Action) -> Rejection | None:
        """Carry out an action, unless it was rejected recently; returns its rejection."""
        key, now_s = target_of(action), self.clock.monotonic_s()
        live = None if key is None else self.cluster.get(key)
        known = self.rejections.recent(uid(about), action, live, now_s)
        if known is not None:
            return known
        try:
            await self._act(about, action)
        except (NameTakenError, ApiRejectedError) as error:
            rejection = Rejection(action, error)
            self.rejections.record_attempt(uid(about), rejection, live, now_s)
            return rejection
        return None

    async def _act(self, about: Manifest, action: Action) -> None:
        match action:
            case Apply():
                await self._apply(about, action)
            case Delete():
                await self.cluster.delete(action.ref, uid=action.uid, grace_s=action.grace_s)
            case SetFinalizers() | Adopt() | CompleteRequest() | WriteStatus():
                await self._write_back(action)
            case SendCommand() | ReleaseOrder() | DrainHosts() | UpdateBrokers():
                await self._send(about, action)
            case RecordEvent():
                await self.events.record(about, action)
            case AckReport():
                self.reports.acknowledge(uid(about), action.position)

    async def _apply(self, about: Manifest, action: Apply) -> None:
        live = self.cluster.get(ref(action.manifest))
        if live is not None and self._last_applied.is_current(uid(about), action.manifest, live):
            return
        made = await self.cluster.apply(action.manifest, manager=action.manager)
        self._last_applied.remember(uid(about), action.manifest, made)
        self.record_apply(about, action.manifest)

    async def _write_back(
        self, action: SetFinalizers | Adopt | CompleteRequest | WriteStatus
    ) -> None:
        """Write to an object that others own or watch, as it was observed."""
        match action:
            case WriteStatus():
                await self.cluster.replace_status(action.observed, action.status)
            case SetFinalizers():
                await self.cluster.set_finalizers(action.observed, action.finalizers)
            case Adopt():
                await self.cluster.adopt(action.observed, action.metadata)
            case CompleteRequest():
                asked = self.cluster.get(action.ref)
                if asked is not None and uid(asked) == action.uid:
                    # Not through the status writer: a write that is held back here is lost.
                    await self.cluster.replace_status(asked, action.status.to_json())

    async def _send(
        self, about: Manifest, order: SendCommand | ReleaseOrder | DrainHosts | UpdateBrokers
    ) -> None:
        match order:
            case SendCommand():
                await self._send_command(about, order)
            case ReleaseOrder():
                await self._ask_release(about, order)
            case DrainHosts():
                await drain_hosts(self.cluster, self.client, about, order)
            case UpdateBrokers():
                await update_brokers(self.cluster, self.client, about, order)

    async def _send_command(self, about: Manifest, order: SendCommand) -> None:
        """Send a command, unless it was sent recently; a lost one is sent again."""
        ordered = f"{order.request.command_id}@{self.reports.run(uid(about)).acknowledged.epoch}"
        now = self.clock.monotonic_s()
        if now - self._sent.get(ordered, float("-inf")) < RESEND_COMMAND_S:
            return
        self._sent = {k: at for k, at in self._sent.items() if now - at < RESEND_COMMAND_S}
        self._sent[ordered] = now
        namespace = about["metadata"].get("namespace", "default")
        try:
            await self.client.send_command(
                self.cluster.address(namespace, order.target), order.request
            )
        except RemoteError as error:
            log.warning("command %s was not accepted: %s", order.request.command_id, error)

    async def _ask_release(self, about: Manifest, order: ReleaseOrder) -> None:
        """Forward a request; without an answer it is sent again, which the service recognizes."""
        namespace = about["metadata"].get("namespace", "default")
        address = self.cluster.address(namespace, order.target)
        try:
            answer = await self.client.ask_release(address, order)
        except RemoteError as error:
            log.warning("request %s was not answered: %s", order.request_id, error)
        else:
            self.reports.release_answers[uid(about)] = ReleaseAnswer(order.request_id, answer)

    def forget(self, gone_uid: str) -> None:
        self._last_applied.forget(gone_uid)


async def drain_hosts(
    cluster: Cluster, peers: RemoteClient, about: Manifest, action: DrainHosts
) -> None:
    """Delete the hosts that every broker reports empty; later passes retry the others.

    A broker's hold expires: a host that could not be deleted before stays, since it may hold
    environments again.
    """
    pool = about["metadata"]["name"]
    try:
        async with asyncio.timeout(HOLD_S - DELETE_MARGIN_S):
            empty = await _empty_hosts(cluster, peers, about, action)
            for key, known in action.hosts.items():
                if key.name in empty:
                    await cluster.delete(key, uid=known)
    except RemoteError as error:
        log.warning("pool %s: no host was drained: %s", pool, error)
    except TimeoutError:
        log.warning("pool %s: hosts stay, draining took longer than brokers hold them", pool)


async def update_brokers(
    cluster: Cluster, peers: RemoteClient, about: Manifest, action: UpdateBrokers
) -> None:
    """Give each broker the pool's spec; later passes ask again those that did not take it."""
    namespace = about["metadata"].get("namespace", "default")
    for target in action.targets:
        try:
            await peers.update_pool(cluster.address(namespace, target), action.pool_json)
        except RemoteError as error:
            log.warning("a broker did not take the pool's spec: %s", error)


async def _empty_hosts(
    cluster: Cluster, peers: RemoteClient, about: Manifest, action: DrainHosts
) -> Set[str]:
    namespace = about["metadata"].get("namespace", "default")
    named = [key.name for key in action.hosts]
    empty = set(named)
    for target in action.brokers:
        empty &= await peers.drain(cluster.address(namespace, target), named)
    return empty
