"""Routes of calls between a pool's brokers: batches by their keys, leases by their hosts."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import grpc

from etude.common.errors import (
    EtudeError,
    ForbiddenError,
    FullError,
    InvalidFieldError,
    ReusedIdError,
    UnavailableError,
    UnknownIdError,
)
from etude.common.pools.broker_shards import batch_key, choose_shard, granting_label
from etude.common.rpc.retry_after import retry_after_s
from etude.envserver.broker.broker import MOVING_S, Broker
from etude.envserver.broker.shards.peers import Peer, Peers
from etude.envserver.broker.snapshot_search import SNAPSHOT_S
from etude.v1 import broker_peers_pb2, environments_pb2, plan_pb2

log = logging.getLogger(__name__)

FIND_DEADLINE_S = 2.0
FORWARD_DEADLINE_S = 5.0
ASK_EVERY_S = 0.1
"""Between two questions to all brokers for a snapshot."""
RENEWAL_PASSES = 2
"""A host that moves is known to its next broker before its last one forgets it, but may reach one
that was already asked."""

Launch = environments_pb2.LaunchBatchRequest
Outcome = environments_pb2.LaunchBatchResponse


@dataclass(slots=True)
class ShardRouter:
    """Serves each call here or at the broker that it belongs to."""

    broker: Broker
    peers: Peers

    def connect(self) -> None:
        """Let broker and peers know of each other's loads."""
        self.broker.held_elsewhere = self.peers.held_elsewhere
        self.broker.queue.num_brokers = lambda: 1 + len(self.peers.living)
        self.peers.make_load = self.make_load

    def make_load(self) -> broker_peers_pb2.ShardLoad:
        """Load of this broker, for the others."""
        broker = self.broker
        runs = {*broker.ledger.by_run, *broker.streams.runs}
        reserved = broker.queue.num_reserved(now_s=time.monotonic())
        return broker_peers_pb2.ShardLoad(
            free=max(0, broker.ledger.num_free - reserved),
            waiting=len(broker.queue),
            held_by_run={run_id: broker.held_by_run(run_id) for run_id in runs},
        )

    async def launch(self, request: Launch) -> AsyncGenerator[Outcome, None]:
        """Outcomes of one batch, wherever it is served.

        Raises:
            UnavailableError: the broker that has the batch does not answer: a repeated request
                finds another.
            FullError: it is full.
            InvalidFieldError: the request cannot be served as it is.
        """
        home = await self._home(request)
        outcomes = self.launch_here(request) if home is None else self._launch_there(home, request)
        async with contextlib.aclosing(outcomes):
            async for outcome in outcomes:
                yield outcome

    async def launch_here(self, request: Launch) -> AsyncGenerator[Outcome, None]:
        """Outcomes of a batch that belongs to this broker.

        Raises:
            UnavailableError: a broker that may have leases of the batch does not answer.
        """
        elsewhere: dict[int, environments_pb2.HeldLease] = {}
        if request.is_repeated and self.peers.addresses is not None:
            # Leases of a broker that was lost reach others with their hosts.
            await asyncio.sleep(self.peers.settles_in_s(now_s=time.monotonic()))
            elsewhere = await self._find_leases(request)
        mine = Launch()
        mine.CopyFrom(request)
        mine.is_repeated = False
        async with contextlib.aclosing(self.broker.launch(mine, elsewhere)) as outcomes:
            async for outcome in outcomes:
                yield outcome

    async def renew(self, lease_ids: Sequence[str], ttl_s: int, *, owner: str = "") -> list[str]:
        """Push the ends of leases; returns those that no broker knows.

        Args:
            lease_ids: of the leases.
            ttl_s: time to live from now on.
            owner: whose leases they are, as the certificate of the caller says.

        Raises:
            ForbiddenError: one belongs to another owner.
            UnavailableError: a broker that may know them does not answer, or hosts are moving.
        """
        known, unknown = self.broker.ledger.split_known(lease_ids, owner)
        self.broker.renew(known, ttl_s)
        self.refuse_moving(unknown)
        missing = unknown
        for _ in range(RENEWAL_PASSES):
            missing = await self._renew_elsewhere(missing, ttl_s, owner)
            arrived, missing = self.broker.ledger.split_known(missing, owner)
            self.broker.renew(arrived, ttl_s)
            if not missing or not self.peers.living:
                break
        self.refuse_moving(missing)
        return self.broker.renew(missing, ttl_s) if missing else []

    def refuse_moving(self, lease_ids: Sequence[str]) -> None:
        """Refuse an answer about unknown leases while hosts move between brokers.

        Raises:
            UnavailableError: they may turn up at another broker.
        """
        now_s, is_alone = time.monotonic(), not self.peers.living
        if lease_ids and not self.peers.has_met(now_s=now_s):
            raise UnavailableError(
                "this broker has just started and has not met all others yet: try again in 2 s"
            )
        if lease_ids and self.peers.settles_in_s(now_s=now_s):
            raise UnavailableError(
                "a broker of this pool was lost and its hosts are moving: try again in 2 s"
            )
        lost = {each.lease.lease_id for each in self.broker.ledger.lost_since(now_s - MOVING_S)}
        if not is_alone and not lost.isdisjoint(lease_ids):
            raise UnavailableError(
                "a silent host may be moving to another broker: try again in 2 s"
            )

    async def release(self, lease_ids: Sequence[str], *, owner: str = "") -> None:
        """End leases, each at the broker of its host."""
        known, unknown = self.broker.ledger.split_known(lease_ids, owner)
        calls = []
        if unknown:
            request = broker_peers_pb2.ForwardReleaseRequest(owner=owner)
            request.release.lease_ids[:] = unknown
            calls = [
                self.peers.stub(peer).ForwardRelease(request, timeout=FORWARD_DEADLINE_S)
                for peer in self.peers.living
            ]
        await self.broker.release(known)
        for failure in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(failure, grpc.aio.AioRpcError):
                # They are not renewed any more, so they expire.
                log.warning("leases not released: %s", failure.details())

    async def report_plan(
        self, run_id: str, plan: plan_pb2.RolloutPlan
    ) -> list[environments_pb2.TemplateReady]:
        """Give each broker its part of a plan; returns the soonest that one could have each."""
        others = self.peers.living
        parts = divide_plan(plan, [self.peers.name, *(each.name for each in others)])
        found = self.broker.report_plan(run_id, parts[self.peers.name])
        calls = []
        for each in others:
            request = broker_peers_pb2.ForwardPlanRequest()
            request.report.run_id = run_id
            request.report.plan.CopyFrom(parts[each.name])
            calls.append(self.peers.stub(each).ForwardPlan(request, timeout=FORWARD_DEADLINE_S))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, broker_peers_pb2.ForwardPlanResponse):
                found += answer.templates
        return soonest(found)

    async def prepare(self, request: environments_pb2.PrepareGroupRequest) -> None:
        """Announce a group where its batches will be served.

        Raises:
            EtudeError: the broker that has them does not take it.
        """
        home = self.peers.home(batch_key("", request.group_id, request.image))
        if home is None or not request.group_id:
            self.broker.prepare(request)
            return
        forwarded = broker_peers_pb2.ForwardGroupRequest(prepare=request)
        try:
            await self.peers.stub(home).ForwardGroup(forwarded, timeout=FORWARD_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            _raise_own(home, error)

    async def _home(self, request: Launch) -> Peer | None:
        """The broker of a batch; a snapshot's is the one whose host holds it."""
        if not request.snapshot_id or not self.peers.living:
            key = batch_key(request.idempotency_key, request.group_id, request.image)
            return self.peers.home(key)
        until_s = time.monotonic() + SNAPSHOT_S
        while not self.broker.ledger.hosts.has_snapshot(request.run_id, request.snapshot_id):
            found = await self._find(request)
            holder = next((peer for peer, each in found if each.has_snapshot), None)
            if holder is not None or time.monotonic() >= until_s:
                return holder
            await asyncio.sleep(ASK_EVERY_S)
        return None

    async def _find_leases(self, request: Launch) -> dict[int, environments_pb2.HeldLease]:
        found = await self._find(request)
        return {held.index: held for _, answer in found for held in answer.held}

    async def _find(self, request: Launch) -> list[tuple[Peer, broker_peers_pb2.FindBatchResponse]]:
        wanted = broker_peers_pb2.FindBatchRequest(
            run_id=request.run_id,
            idempotency_key=request.idempotency_key,
            snapshot_id=request.snapshot_id,
        )

        async def ask(peer: Peer) -> tuple[Peer, broker_peers_pb2.FindBatchResponse]:
            try:
                return peer, await self.peers.stub(peer).FindBatch(wanted, timeout=FIND_DEADLINE_S)
            except grpc.aio.AioRpcError as error:
                _raise_own(peer, error)

        return await asyncio.gather(*map(ask, self.peers.living))

    async def _launch_there(self, home: Peer, request: Launch) -> AsyncGenerator[Outcome, None]:
        forwarded = broker_peers_pb2.ForwardLaunchRequest(launch=request)
        try:
            async for answer in self.peers.stub(home).ForwardLaunch(forwarded):
                yield answer.outcome
        except grpc.aio.AioRpcError as error:
            _raise_own(home, error)

    async def _renew_elsewhere(self, lease_ids: list[str], ttl_s: int, owner: str) -> list[str]:
        """Renew leases at the other brokers, one after the other; returns those that none knew."""
        request = broker_peers_pb2.ForwardRenewalRequest(owner=owner)
        request.renewal.ttl_seconds = ttl_s
        missing = lease_ids
        for peer, asked in self._routes(lease_ids):
            wanted = [each for each in asked if each in missing]
            if not wanted:
                continue
            request.renewal.lease_ids[:] = wanted
            told = await self._renew_there(peer, request)
            missing = [each for each in missing if each not in wanted or each in told]
        return missing

    def _routes(self, lease_ids: Iterable[str]) -> list[tuple[Peer, list[str]]]:
        """Brokers to ask for leases, in order: those that granted them, then all others."""
        ids = list(lease_ids)
        granted: dict[str, tuple[Peer, list[str]]] = {}
        for lease_id in ids:
            peer = self.peers.by_label(granting_label(lease_id))
            if peer is not None:
                granted.setdefault(peer.name, (peer, []))[1].append(lease_id)
        return [*granted.values(), *((peer, ids) for peer in self.peers.living if ids)]

    async def _renew_there(
        self, peer: Peer, request: broker_peers_pb2.ForwardRenewalRequest
    ) -> set[str]:
        """The leases that another broker does not know.

        Raises:
            EtudeError: it does not answer.
        """
        try:
            answer = await self.peers.stub(peer).ForwardRenewal(request, timeout=FORWARD_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            _raise_own(peer, error)
        return set(answer.missing_lease_ids)


def divide_plan(
    plan: plan_pb2.RolloutPlan, names: Collection[str]
) -> dict[str, plan_pb2.RolloutPlan]:
    """Parts of a plan by broker: an equal share of each wave, rounded up, and its own images."""
    parts = {name: plan_pb2.RolloutPlan() for name in names}
    for part in parts.values():
        part.CopyFrom(plan)
        del part.images[:]
        for wave in part.waves:
            wave.count = -(-wave.count // len(parts))
            wave.with_image = -(-wave.with_image // len(parts))
    for image in plan.images:
        parts[choose_shard(batch_key("", "", image.image), names)].images.append(image)
    return parts


def soonest(
    told: Iterable[environments_pb2.TemplateReady],
) -> list[environments_pb2.TemplateReady]:
    """The soonest of the times that brokers name for each template."""
    found: dict[str, environments_pb2.TemplateReady] = {}
    for each in told:
        known = found.get(each.template)
        if known is None or each.ready_by_unix_ms < known.ready_by_unix_ms:
            found[each.template] = each
    return list(found.values())


def _raise_own(peer: Peer, error: grpc.aio.AioRpcError) -> NoReturn:
    """Raise the error of another broker as one of this broker, for the client.

    Raises:
        EtudeError: always.
    """
    own = _own_error(peer, error)
    raise own from error


def _own_error(peer: Peer, error: grpc.aio.AioRpcError) -> EtudeError:
    what = error.details() or error.code().name
    later_s = retry_after_s(error)
    if later_s is not None:
        return FullError(what, retry_after_s=later_s)
    match error.code():
        case grpc.StatusCode.INVALID_ARGUMENT:
            field, _, wrong = what.partition(": ")
            return InvalidFieldError(field, wrong)
        case grpc.StatusCode.PERMISSION_DENIED:
            return ForbiddenError(what)
        case grpc.StatusCode.NOT_FOUND:
            return UnknownIdError(what)
        case grpc.StatusCode.ALREADY_EXISTS:
            return ReusedIdError(what)
        case _:
            return UnavailableError(f"broker {peer.name} at {peer.target}: {what}")
