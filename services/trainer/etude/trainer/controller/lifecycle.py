"""Lifecycle of the controller process: take over the run, serve it, train it, report its end."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

from etude.common import telemetry
from etude.common.api.run.spec import RLRunSpec
from etude.common.api.run.weights import Weights
from etude.common.errors import EtudeError, FencedError, InvalidFieldError, UserError
from etude.common.probes import Probes
from etude.common.process import shutdown_signals
from etude.common.role_inputs import ResolvedRun
from etude.common.rpc.server import Server
from etude.common.run_folder.record import open_record
from etude.trainer import ray_backend
from etude.trainer.compactor.compactor import KeeperConfig
from etude.trainer.compactor.report import Keeping
from etude.trainer.controller.admission.plans import Planner
from etude.trainer.controller.checkpoints.recovery import Opened, open_run
from etude.trainer.controller.checkpoints.saver import Saver
from etude.trainer.controller.inputs import Inputs
from etude.trainer.controller.phases.targets import conclude
from etude.trainer.controller.program import train
from etude.trainer.controller.publishing.compaction import Upkeep
from etude.trainer.controller.publishing.engines import Engines
from etude.trainer.controller.publishing.versions import Versions
from etude.trainer.controller.reporting.commands import Orders
from etude.trainer.controller.reporting.recorder import Recording
from etude.trainer.controller.reporting.reports import Reports
from etude.trainer.controller.reporting.service import NAME, RunService
from etude.trainer.controller.run import Run, RunFailedError, root_cause
from etude.trainer.exit_codes import exit_code
from etude.trainer.export.receipts import NonFiniteWeightsError
from etude.trainer.learner.batches import NonFiniteLossError
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.protocol import Learners
from etude.trainer.rollouts.protocol import Rollouts, WorkerConfig
from etude.trainer.settings import Settings
from etude.v1 import run_pb2, run_pb2_grpc

_FINAL = (RunFailedError, NonFiniteLossError, NonFiniteWeightsError, InvalidFieldError)
"""Errors that a restart of this process would only repeat."""


def give_up(run: Run, error: BaseException) -> int:
    """Report the failure that ends this process; return the exit code."""
    log.error("the run stops", exc_info=error)
    status = run.reports.status
    status.reason = error.reason if isinstance(error, EtudeError) else type(error).__name__
    status.message = str(error)[:2048]
    run.tell(status.reason, status.message, warning=True)
    run.recording.write_rows_now()
    if isinstance(error, UserError):
        run.reports.state(run_pb2.RUN_STATE_FAILED)
        return 78
    if isinstance(error, FencedError):
        # Another controller runs it now: this process must neither fail the run nor restart.
        run.reports.state(run_pb2.RUN_STATE_DRAINING)
        return 0
    if isinstance(error, _FINAL):
        run.reports.state(run_pb2.RUN_STATE_FAILED)
        return 0
    run.reports.touch()
    # Training itself waits for the store. Other failures, as of the checkpoint that ends a phase,
    # are repeated by the next process and may recur for ever: these restarts count. If the store
    # is unreachable, the next process finds that out while it loads, and is not counted.
    return exit_code(error) if status.state == run_pb2.RUN_STATE_LOADING else 1


log = logging.getLogger(__name__)

QUEUE_MARGIN_S = 600.0
"""Scoring queues for environments too."""

LAST_WORDS_S = 1.0
"""Time for watchers to read the last report of a process that exits on an error."""


class Parts(NamedTuple):
    """Actors that the controller drives."""

    learners: Learners
    rollouts: Rollouts
    keeping: Keeping


async def serve(settings: Settings, resolved: ResolvedRun, inputs: Inputs) -> int:
    """Train the run and serve its status until told to stop; return the exit code.

    A run that is done, suspended or failed for good waits to be stopped, so that its last report
    can be read. Any other error ends the process, and a new one resumes the run.
    """
    stop = asyncio.Event()
    with shutdown_signals(stop), _traced(settings, resolved):
        # Learners load their libraries while the controller takes over the run.
        learners = ray_backend.learners(
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
        rollouts = ray_backend.rollouts(
            _worker_config(settings, resolved, inputs),
            workers=resolved.spec.roles.trainer.rollout_workers if settings.brokers else 0,
        )
        keeping = ray_backend.keeper(_keeper_config(settings, resolved, opened.epoch))
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
    """Record trace spans, and flush them at the end."""
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
    rendezvous = ray_backend.rendezvous() if trainer.learner_ranks > 1 else ""
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
    """Settings of the publishers: Auto means L1 if the ranks of an engine may cut a tile."""
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
    """Serve gRPC and probes while the block runs."""
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
        run.tell("CheckpointCorrupt", f"skipped: {problem}", warning=True)
    if opened.is_put_back:
        where = f"restored to step {run.cursor.global_step}, as checkpointing.resume says"
        run.tell("PutBack", f"{where}; later checkpoints stay in the store")
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
        return give_up(run, ray_backend.as_raised(root_cause(caught)))
    if is_done:
        conclude(run)
    else:
        run.reports.state(run_pb2.RUN_STATE_SUSPENDED)
    return 0
