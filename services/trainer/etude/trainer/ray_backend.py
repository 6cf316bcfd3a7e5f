"""Ray backend: actors for learner ranks, rollout workers and the compactor."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from typing_extensions import override

from etude.common.api.run.phases import Phase
from etude.common.checkpoints.manifest import CheckpointObject
from etude.common.weights import VersionId
from etude.trainer.compactor.compactor import CompactorConfig, CompactorProcess
from etude.trainer.compactor.report import CompactorClient, CompactorReport
from etude.trainer.export.receipts import PublishBase, RankReceipt
from etude.trainer.learner.batches import PolicyBatch, StepResult
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.protocol import Learners
from etude.trainer.learner.rank import LearnerRank
from etude.trainer.rank_placement import place_ranks
from etude.trainer.ray_calls import gather_answers, unwrap_ray_error
from etude.trainer.rollouts.protocol import (
    GroupRequest,
    GroupResult,
    RolloutWorkers,
    WorkerConfig,
    WorkerLostError,
    share_token_slots,
    split_evenly,
)
from etude.trainer.rollouts.worker import RolloutWorker
from etude.trainer.rollouts.worker_choice import WorkerChoice
from etude.trainer.routing.table import Loads, RoutingTable, RoutingUpdate, sum_loads

log = logging.getLogger(__name__)

UPLOADS = "uploads"
"""Ray's name for the thread of a learner rank that uploads encoded versions."""

CHECKPOINTS = "checkpoints"
"""Ray's name for the thread of a learner rank that stores its part of a checkpoint."""

FETCHES = "fetches"
"""Ray's name for the thread of a learner rank that fetches tokens ahead of their step."""

OBJECT_STORE_BYTES = 256 << 20
"""Batches travel through it one at a time; Ray spills what does not fit."""

START_ATTEMPTS = 4
"""Attempts at starting a local Ray before its failure ends the run."""

TOO_SLOW = "timed out during startup"
"""Ray's message for a node that is late; it has no error type of its own."""

Actor = Any
"""Ray's handles have no static type."""


def start_ray(address: str | None, env: Mapping[str, str] = MappingProxyType({})) -> None:
    """Join a Ray cluster, or start one on this machine for this run alone.

    Args:
        address: of the cluster to join.
        env: variables for this run's actors; those of a Ray that starts here have the
            environment of this process anyway.

    Raises:
        Exception: Ray's own, after the last attempt.
    """
    if address is not None:
        ray.init(
            address=address,
            log_to_driver=True,
            logging_level=logging.WARNING,
            runtime_env={"env_vars": dict(env)},
        )
        return
    for left in reversed(range(START_ATTEMPTS)):
        try:
            _start_here()
        except Exception as error:
            # Ray waits 30 s for its node, which a busy machine may exceed; what this process
            # has imported by then took longer.
            if TOO_SLOW not in str(error) or not left:
                raise
            log.warning("Ray's node did not start in time; %d attempts left", left)
            ray.shutdown()
        else:
            return


def _start_here() -> None:
    ray.init(
        include_dashboard=False,
        num_cpus=1,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=True,
        logging_level=logging.WARNING,
        _system_config={
            # Idle workers for tasks that never come would cost memory and start-up time.
            "enable_worker_prestart": False,
            "prestart_worker_first_driver": False,
            # Ray nices its workers by 15: beside a busy engine the rollouts that feed it starve.
            "worker_niceness": 0,
        },
    )


def stop_ray() -> None:
    """End every actor, and the cluster if it is local."""
    ray.shutdown()


def create_learners(configs: Sequence[LearnerConfig], *, gpus_per_node: int) -> "RayLearners":
    """Start one actor per rank. A rank that dies ends the run's process, which then resumes.

    Args:
        configs: of the ranks, in order.
        gpus_per_node: GPUs of each node for ranks, one for each; 0 has all ranks on this node.
    """
    starting = asyncio.create_task(_start_learners(configs, gpus_per_node), name="learner-ranks")
    return RayLearners(starting)


async def _start_learners(configs: Sequence[LearnerConfig], gpus_per_node: int) -> list[Actor]:
    """Place the ranks, start them, and wait until all have loaded."""
    places = await place_ranks(
        ranks=len(configs),
        group_size=len(configs) // configs[0].replicas,
        gpus_per_node=gpus_per_node,
    )
    options = {"num_cpus": 0, "num_gpus": min(1, gpus_per_node), "max_restarts": 0}
    # Uploads have threads of their own; everything else stays on one, in the order of the calls.
    actor = ray.remote(concurrency_groups={UPLOADS: 1, CHECKPOINTS: 1, FETCHES: 1})(LearnerRank)
    ranks = [
        actor.options(**options, scheduling_strategy=place.strategy).remote(config)
        for place, config in zip(places, configs, strict=True)
    ]
    # All import torch meanwhile, which is most of this call.
    opened = [rank.open_rendezvous.remote(places[0].address) for rank in ranks]
    rendezvous, *_ = await gather_answers(opened, what="open_rendezvous")
    await gather_answers([rank.load.remote(rendezvous) for rank in ranks], what="load")
    return ranks


def create_rollout_workers(config: WorkerConfig, *, workers: int) -> "RayRollouts":
    """Start workers that share the load, on all nodes; Ray restarts one that dies."""
    options = {"num_cpus": 0, "max_restarts": -1, "max_concurrency": 100_000}
    actor = ray.remote(RolloutWorker).options(**options, scheduling_strategy="SPREAD")
    return RayRollouts([_Worker(actor.remote(config)) for _ in range(workers)])


def create_compactor(config: CompactorConfig) -> "RayCompactor":
    """Start the compactor on the controller's node and disk; Ray restarts it if it dies."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": here}
    return RayCompactor(ray.remote(CompactorProcess).options(**options).remote(config))


@dataclass(slots=True)
class RayCompactor(CompactorClient):
    """The compactor as an actor."""

    actor: Actor

    @override
    async def run_round(self, epoch: int) -> CompactorReport:
        try:
            report: CompactorReport = await self.actor.run_round.remote(epoch)
        except RayTaskError as error:
            raise unwrap_ray_error(error) from error
        return report


@dataclass(slots=True)
class RayLearners(Learners):
    """All learner ranks. Each call goes to every rank; rank 0's answer is returned."""

    starting: "asyncio.Future[list[Actor]]"
    """The actors, once they have loaded, which may raise a user's mistake."""

    async def _call(self, method: str, *arguments: object) -> Any:  # noqa: ANN401 - as Ray has it
        answers = await self._answers(method, *arguments)
        return answers[0]

    async def _answers(
        self, method: str, *arguments: object, group: str | None = None
    ) -> list[Any]:
        # A call that is cancelled leaves the start to the next one.
        ranks = await asyncio.shield(self.starting)
        # One copy in the object store, however many ranks read it.
        shared = [_put_shared(argument) for argument in arguments]
        methods = [getattr(rank, method) for rank in ranks]
        if group is not None:
            methods = [each.options(concurrency_group=group) for each in methods]
        return await gather_answers([each.remote(*shared) for each in methods], what=method)

    @override
    async def start_phase(self, phase: Phase, step: int, data_cursor: str = "") -> None:
        await self._call("start_phase", phase.to_json(), step, data_cursor)

    @override
    async def supervised_step(self, step: int) -> StepResult:
        result: StepResult = await self._call("supervised_step", step)
        return result

    @override
    async def held_out_losses(self) -> Mapping[str, float]:
        losses: Mapping[str, float] = await self._call("held_out_losses")
        return losses

    @override
    async def policy_step(self, batch: PolicyBatch) -> StepResult:
        result: StepResult = await self._call("policy_step", batch)
        return result

    @override
    def fetch_contents(self, references: Sequence[bytes], steps: int) -> None:
        if self.starting.done():  # else no phase was started, and no rollout finished
            for rank in self.starting.result():
                method = rank.fetch_contents.options(concurrency_group=FETCHES)
                method.remote(references, steps)

    @override
    async def measure_divergence(self, batch: PolicyBatch) -> float:
        divergence: float = await self._call("measure_divergence", batch)
        return divergence

    @override
    async def encode(self, version: VersionId, base: PublishBase | None) -> list[RankReceipt]:
        receipts: list[RankReceipt] = await self._answers("encode", version, base)
        return receipts

    @override
    async def upload(self, version: VersionId) -> None:
        await self._answers("upload", version, group=UPLOADS)

    @override
    async def copy_state(self, prefix: str) -> None:
        await self._call("copy_state", prefix)

    @override
    async def save(self, prefix: str) -> list[CheckpointObject]:
        objects: list[list[CheckpointObject]]
        objects = await self._answers("save", prefix, group=CHECKPOINTS)
        return [each for of_rank in objects for each in of_rank]

    @override
    async def restore(self, prefix: str) -> None:
        await self._call("restore", prefix)

    @override
    async def export(self, prefix: str) -> list[CheckpointObject]:
        objects: list[CheckpointObject] = await self._call("export", prefix)
        return objects


def _put_shared(argument: object) -> object:
    return ray.put(argument) if isinstance(argument, PolicyBatch) else argument


@dataclass(slots=True)
class _Worker:
    actor: Actor
    load: int = 0
    """Rollouts under way."""
    engine_loads: Loads = field(default_factory=dict)
    """Its calls in flight, when it last reported them."""


REVIVAL_S = 120.0
"""Longest wait for a restarted worker: imports on a busy machine."""

PING_EVERY_S = 0.5

ROUTING_S = 5.0
"""Longest wait for workers that take a routing table; a late one gets the next."""

CLOSE_S = 10.0
"""Longest wait for workers that close."""


@dataclass(slots=True)
class RayRollouts(RolloutWorkers):
    """Rollout workers; each request goes to the one of its group, or to the least loaded one."""

    workers: list[_Worker]
    _choice: WorkerChoice = field(default_factory=WorkerChoice)
    _dropped: set[str] = field(default_factory=set)
    """Rollouts that were cancelled for good, until their requests have ended."""

    async def close(self) -> None:
        goodbyes = [asyncio.ensure_future(w.actor.close.remote()) for w in self.workers]
        if goodbyes:
            await asyncio.wait(goodbyes, timeout=CLOSE_S)

    @override
    async def run(self, order: GroupRequest) -> GroupResult:
        parts = split_evenly(order.limits.max_concurrent, len(self.workers))
        loads = [worker.load for worker in self.workers[: len(parts)]]
        place = self._choice.choose(order.group_id, loads)
        share, worker = parts[place], self.workers[place]
        worker.load += len(order.indices)
        order = replace(order, share=share, routing=self._part_of(order.routing, worker))
        reference = worker.actor.run_group.remote(order)
        try:
            result: GroupResult = await reference
        except RayActorError as error:
            if error.actor_init_failed:  # Ray restarts no actor whose constructor failed
                words = " ".join(str(error).split())
                raise WorkerLostError(f"its rollout worker did not start: {words}") from error
            await self._await_restart(worker)
            raise WorkerLostError("its rollout worker died and was restarted") from error
        except asyncio.CancelledError:
            is_dropped = not self._dropped.isdisjoint(map(order.rollout_id, order.indices))
            worker.actor.cancel_group.remote(order.group_id, is_dropped=is_dropped)
            raise
        finally:
            worker.load -= len(order.indices)
            self._dropped.difference_update(map(order.rollout_id, order.indices))
        return result

    @override
    async def write_rollouts(self, step: int, split: str, records: Sequence[bytes]) -> None:
        worker = min(self.workers, key=lambda each: each.load)
        try:
            await worker.actor.write_rollouts.remote(step, split, records)
        except RayActorError as error:
            await self._await_restart(worker)
            raise WorkerLostError("the rollout worker that wrote them died") from error
        except RayTaskError as error:
            raise unwrap_ray_error(error) from error

    @override
    def drop_rollouts(self, rollout_ids: Sequence[str]) -> None:
        self._dropped.update(rollout_ids)
        for worker in self.workers:  # one that died has left its records to a successor
            worker.actor.drop_rollouts.remote(list(rollout_ids))

    @property
    @override
    def num_workers(self) -> int:
        return len(self.workers)

    @override
    async def update_routing(self, table: RoutingTable) -> None:
        await asyncio.gather(*(self._update_worker(worker, table) for worker in self.workers))

    def _part_of(self, table: RoutingTable, worker: _Worker) -> RoutingTable:
        """The table with a worker's share of the token slots."""
        if not table.token_slots:
            return table
        shares = share_token_slots(table.token_slots, len(self.workers))
        place = next(i for i, each in enumerate(self.workers) if each is worker)
        return replace(table, token_slots=shares[place])

    async def _update_worker(self, worker: _Worker, table: RoutingTable) -> None:
        others = sum_loads(each.engine_loads for each in self.workers if each is not worker)
        reference = worker.actor.update_routing.remote(
            RoutingUpdate(self._part_of(table, worker), others)
        )
        try:
            worker.engine_loads = await asyncio.wait_for(reference, ROUTING_S)
        except (RayActorError, TimeoutError):
            # It restarts, or is busy: its calls ended with it, or count again once it answers.
            worker.engine_loads = {}

    async def _await_restart(self, worker: _Worker) -> None:
        """Wait until a lost worker answers again; before that it would only lose the next attempt.

        Raises:
            WorkerLostError: it did not come back in time.
        """
        try:
            await asyncio.wait_for(_ping_until_answered(worker.actor), REVIVAL_S)
        except TimeoutError as error:
            what = f"its rollout worker died and did not come back within {REVIVAL_S:.0f} s"
            raise WorkerLostError(what) from error


async def _ping_until_answered(actor: Actor) -> None:
    while True:
        try:
            await actor.ping.remote()
        except RayActorError:
            await asyncio.sleep(PING_EVERY_S)
        else:
            return
