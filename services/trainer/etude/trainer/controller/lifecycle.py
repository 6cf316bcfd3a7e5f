"""The controller's life: take over the run, serve it, train it, and say how it ended."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

from etude.common import telemetry
from etude.common.api.run import RLRunSpec
from etude.common.api.weights import Weights
from etude.common.files import ResolvedRun
from etude.common.probes import Probes
from etude.common.record import open_record
from etude.common.serving import Server, shutdown_signals
from etude.trainer import cluster
from etude.trainer.controller.engines import Engines
from etude.trainer.controller.failing import give_up
from etude.trainer.controller.inputs import Inputs
from etude.trainer.controller.orders import Orders
from etude.trainer.controller.outcomes import conclude
from etude.trainer.controller.planning import Planner
from etude.trainer.controller.program import train
from etude.trainer.controller.recording import Recording
from etude.trainer.controller.recovery import Opened, open_run
from etude.trainer.controller.reports import Reports
from etude.trainer.controller.run import Run, root_cause
from etude.trainer.controller.saving import Saver
from etude.trainer.controller.upkeep import Keeping, Upkeep
from etude.trainer.controller.versions import Versions
from etude.trainer.keeper import KeeperConfig
from etude.trainer.learner_config import LearnerConfig
from etude.trainer.service import NAME, RunService
from etude.trainer.settings import Settings
from etude.trainer.work import Learners, Rollouts, WorkerConfig
from etude.v1 import run_pb2, run_pb2_grpc

log = logging.getLogger(__name__)

QUEUE_MARGIN_S = 600.0
"""Scoring waits for environments like everybody else."""

LAST_WORDS_S = 1.0
"""Time for watchers to read the last report of a process that exits by itself."""


class Parts(NamedTuple):
    """What runs beside the controller."""

    learners: Learners
    rollouts: Rollouts
    keeping: Keeping


async def serve(settings: Settings, resolved: ResolvedRun, inputs: Inputs) -> int:
    """Train the run and answer for it until told to stop; returns the exit code.

    A run that is done, suspended or failed for good waits to be stopped, so that its last report
    can be read. Anything else that goes wrong ends the process, and a new one resumes.
    """
    stop = asyncio.Event()
    with shutdown_signals(stop), _traced(settings, resolved):
        # Learners load their libraries while the controller takes over the run.
        learners = cluster.learners(
            _learner_configs(settings, resolved, inputs),
            gpus_per_rank=min(1, resolved.spec.roles.trainer.gpus_per_replica),
        )
        opened = await asyncio.to_thread(
            open_run,
            inputs.store,
            run_uid=resolved.uid,
            phases=resolved.spec.phases,
            holder=f"{settings.pod}/{settings.attempt}",
            resume=resolved.resume,
        )
        rollouts = cluster.rollouts(
            _worker_config(settings, resolved, inputs),
            workers=resolved.spec.roles.trainer.rollout_workers if settings.brokers else 0,
        )
        keeping = cluster.keeper(_keeper_config(settings, resolved, opened.epoch))
        parts = Parts(learners, rollouts, keeping)
        run = _assemble(settings, resolved, inputs, opened, parts)
        async with _listening(settings, run):
            _announce(run, opened)
            forward = asyncio.create_task(_forward(stop, run.orders), name="stop")
            code = await _train(run, inputs, opened)
            if code == 0:
                await stop.wait()
            else:
                await asyncio.sleep(LAST_WORDS_S)
            forward.cancel()
            await rollouts.close()
        await run.planner.close()
        await run.engines.close()
    return code


@contextlib.contextmanager
def _traced(settings: Settings, resolved: ResolvedRun) -> Iterator[None]:
    """Trace spans are recorded, and the last ones sent."""
    traces = telemetry.setup(
        "etude-trainer",
        otlp_endpoint=resolved.spec.observability.otlp_endpoint,
        traces_file=settings.traces_file,
    )
    try:
        yield
    finally:
        traces.shutdown()


def _learner_configs(
    settings: Settings, resolved: ResolvedRun, inputs: Inputs
) -> list[LearnerConfig]:
    spec = resolved.spec
    trainer = spec.roles.trainer
    rendezvous = cluster.rendezvous() if trainer.learner_ranks > 1 else ""
    return [
        LearnerConfig(
            run=resolved.uid,
            holder=settings.pod,
            model_folder=inputs.model_folder,
            seed=spec.model.seed,
            storage=spec.storage,
            weights=_published(spec),
            micro_batch_tokens=trainer.micro_batch_tokens,
            threads=trainer.threads_per_rank,
            rank=rank,
            world_size=trainer.learner_ranks,
            rendezvous=rendezvous,
        )
        for rank in range(trainer.learner_ranks)
    ]


def _published(spec: RLRunSpec) -> Weights:
    """How learners publish: with Auto at L1 where several ranks of an engine may cut a tile."""
    weights, engines = spec.weights, spec.roles.inference
    is_cut = engines is not None and engines.gpus_per_replica > 1
    if weights.advanced.codec != "Auto" or not is_cut:
        return weights
    advanced = weights.advanced.model_copy(update={"codec": "L1"})
    return weights.model_copy(update={"advanced": advanced})


def _worker_config(settings: Settings, resolved: ResolvedRun, inputs: Inputs) -> WorkerConfig:
    spec = resolved.spec
    rewards = spec.roles.rewards
    timeouts = [f.limit_s for f in rewards.functions if f.function == "Verifier"] if rewards else []
    return WorkerConfig(
        run=resolved.uid,
        model_folder=inputs.model_folder,
        brokers=dict(settings.brokers),
        templates={role.name: role.template for role in spec.roles.environments},
        rewards_target=settings.rewards_target,
        score_timeout_s=sum(timeouts) + QUEUE_MARGIN_S,
        storage=spec.storage,
        outage_s=spec.weights.timeout_seconds,
        traces_file=settings.traces_file,
        otlp_endpoint=spec.observability.otlp_endpoint,
    )


def _keeper_config(settings: Settings, resolved: ResolvedRun, epoch: int) -> KeeperConfig:
    return KeeperConfig(
        run=resolved.uid,
        epoch=epoch,
        storage=resolved.spec.storage,
        folder=settings.scratch / "keeper",
        weights=resolved.spec.weights,
    )


def _assemble(
    settings: Settings,
    resolved: ResolvedRun,
    inputs: Inputs,
    opened: Opened,
    parts: Parts,
) -> Run:
    spec = resolved.spec
    return Run(
        resolved=resolved,
        epoch=opened.epoch,
        store=inputs.store,
        book=opened.book,
        cursor=opened.cursor,
        figures=opened.figures,
        next_version=opened.next_version,
        branch=opened.branch,
        learners=parts.learners,
        rollouts=parts.rollouts,
        engines=_engines(settings, spec),
        saver=Saver(inputs.store, opened.book, parts.learners),
        versions=Versions(store=inputs.store, run_uid=resolved.uid, holder=settings.pod),
        upkeep=Upkeep(
            keeping=parts.keeping,
            epoch=opened.epoch,
            versions=spec.weights.versions_per_keyframe,
            first=opened.next_version,
        ),
        reports=Reports(resolved.uid, opened.epoch),
        orders=Orders(spec, resolved.generation),
        recording=Recording(open_record(inputs.store)),
        chat=inputs.chat,
        planner=Planner(
            resolved.uid,
            settings.brokers,
            {role.name: role.template for role in spec.roles.environments},
        ),
    )


def _engines(settings: Settings, spec: RLRunSpec) -> Engines:
    engines = Engines.of(settings.inference_targets, spec.weights)
    role = spec.roles.inference
    if role is not None and role.autoscaling.mode == "StepTime":
        engines.limit = role.replicas
    return engines


@contextlib.asynccontextmanager
async def _listening(settings: Settings, run: Run) -> AsyncIterator[None]:
    """GRPC and probes for as long as the block runs."""
    server = Server([NAME], settings.host, settings.port)
    service = RunService(run.reports, run.orders)
    run_pb2_grpc.add_RunServiceServicer_to_server(service, server.grpc_server)
    probes = Probes(settings.probe_port, settings.host)
    await server.start()
    await probes.start()
    await server.ready()
    probes.ready = True
    try:
        yield
    finally:
        probes.ready = False
        await server.stop()
        await probes.stop()


def _announce(run: Run, opened: Opened) -> None:
    run.reports.state(run_pb2.RUN_STATE_LOADING)
    run.report()
    for problem in opened.problems:
        run.tell("CheckpointCorrupt", f"passed over: {problem}", warning=True)
    if opened.is_put_back:
        where = f"put back to step {run.cursor.global_step}, as checkpointing.resume says"
        run.tell("PutBack", f"{where}; what came after it stays in the store")
    log.info(
        "epoch %d of run %s, %s from step %d",
        opened.epoch,
        run.resolved.name,
        "new" if opened.is_new else "resumed",
        run.cursor.global_step,
    )


async def _forward(stop: asyncio.Event, orders: Orders) -> None:
    await stop.wait()
    orders.stop()


async def _train(run: Run, inputs: Inputs, opened: Opened) -> int:
    try:
        is_done = await train(run, inputs.task_sets, checkpoint=opened.checkpoint)
    except Exception as caught:  # noqa: BLE001 - the edge of the process
        return give_up(run, cluster.as_raised(root_cause(caught)))
    if is_done:
        conclude(run)
    else:
        run.reports.state(run_pb2.RUN_STATE_SUSPENDED)
    return 0
