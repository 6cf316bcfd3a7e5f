"""Lifecycle of the controller process: take over the run, serve it, train it, report its end."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator

from etude.common import telemetry
from etude.common.api.run.spec import RLRunSpec, has_changes
from etude.common.api.run.weights import Weights
from etude.common.errors import EtudeError, FencedError, InvalidFieldError, UserError
from etude.common.probes import Probes
from etude.common.process import EXIT_CONFIGURATION, shutdown_signals
from etude.common.role_inputs import ResolvedRun
from etude.common.rpc.server import Server
from etude.common.run_folder.record import open_record
from etude.trainer import ray_backend
from etude.trainer.compactor.compactor import CompactorConfig
from etude.trainer.controller.admission.plans import PlanReporter
from etude.trainer.controller.admission.task_images import TaskImageReader
from etude.trainer.controller.checkpoints.recovery import OpenedRun, open_run
from etude.trainer.controller.inputs import Inputs
from etude.trainer.controller.phases.targets import report_done
from etude.trainer.controller.program import train
from etude.trainer.controller.progress import RunFailedError
from etude.trainer.controller.publishing.engines import Engines, RoutingBroadcast
from etude.trainer.controller.reporting.commands import RunCommands
from etude.trainer.controller.reporting.reporter import RunReporter
from etude.trainer.controller.reporting.reports import NAME, RunService
from etude.trainer.controller.run import Run, RunServices, root_cause
from etude.trainer.exit_codes import exit_code
from etude.trainer.export.receipts import NonFiniteWeightsError
from etude.trainer.learner.batches import RefusedUpdateError
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.ray_calls import unwrap_ray_error
from etude.trainer.rollouts.protocol import WorkerConfig
from etude.trainer.settings import Settings
from etude.v1 import run_pb2, run_pb2_grpc

log = logging.getLogger(__name__)

QUEUE_MARGIN_S = 600.0
"""Scoring queues for environments too."""

FINAL_REPORT_S = 1.0
"""Time for watchers to read the last report of a process that exits on an error."""


_FINAL = (RunFailedError, RefusedUpdateError, NonFiniteWeightsError, InvalidFieldError)
"""Errors that a restart of this process would only repeat."""


async def serve(settings: Settings, resolved: ResolvedRun, inputs: Inputs) -> int:
    """Train the run and serve its status until told to stop; return the exit code.

    A run that is done, suspended or failed for good waits to be stopped, so that its last report
    can be read. Any other error ends the process, and a new one resumes the run.
    """
    stop = asyncio.Event()
    with shutdown_signals(stop), _telemetry(settings, resolved):
        # Learners load their libraries while the controller takes over the run.
        learners = ray_backend.create_learners(
            learner_configs(settings.pod, resolved, inputs),
            gpus_per_node=resolved.spec.roles.trainer.gpus_per_replica,
        )
        opened = await asyncio.to_thread(
            open_run,
            inputs.store,
            run_uid=resolved.uid,
            phases=resolved.spec.phases,
            added_tokens=resolved.spec.model.add_tokens,
            holder=f"{settings.pod}/{settings.attempt}",
            resume=resolved.resume,
        )
        workers = ray_backend.create_rollout_workers(
            _worker_config(settings, resolved, inputs),
            workers=resolved.spec.roles.trainer.rollout_workers if settings.brokers else 0,
        )
        services = RunServices(
            learners=learners,
            workers=workers,
            engines=_engines(settings, resolved.spec),
            compactor=ray_backend.create_compactor(
                _compactor_config(settings, resolved, opened.epoch)
            ),
            record=open_record(inputs.store),
            plans=_plan_reporter(settings, resolved),
        )
        run = Run.assemble(
            resolved, opened, services, store=inputs.store, holder=settings.pod, chat=inputs.chat
        )
        async with _run_servers(settings, run):
            _announce_start(run, opened)
            routing = RoutingBroadcast(services.engines, workers)
            code = await _train_until_stopped(stop, run, inputs, opened, routing)
            await workers.close()
        await run.plans.close()
        await run.publishing.engines.close()
    return code


@contextlib.contextmanager
def _telemetry(settings: Settings, resolved: ResolvedRun) -> Iterator[None]:
    """Record trace spans, and flush them at the end."""
    traces = telemetry.setup_tracing(
        "etude-trainer",
        otlp_endpoint=resolved.spec.observability.otlp_endpoint,
        traces_file=settings.traces_file,
    )
    try:
        yield
    finally:
        traces.shutdown()


def learner_configs(holder: str, resolved: ResolvedRun, inputs: Inputs) -> list[LearnerConfig]:
    """Configurations of all learner ranks, in order; the holder is the pod's name."""
    spec = resolved.spec
    trainer = spec.roles.trainer
    mesh = trainer.mesh
    base_uri = spec.model.folder
    if has_changes(spec.model.key):
        base_uri = inputs.model_uri or str(inputs.model_folder)
    return [
        LearnerConfig(
            run=resolved.uid,
            holder=holder,
            model_folder=inputs.model_folder,
            model_uri=inputs.model_uri,
            seed=spec.model.seed,
            storage=spec.storage,
            weights=_publish_settings(spec),
            micro_batch_tokens=trainer.micro_batch_tokens,
            packing=trainer.packing,
            activation_checkpointing=trainer.activation_checkpointing,
            compile_blocks=trainer.compile_blocks,
            lora=trainer.lora,
            base_uri=base_uri,
            cpu_offload=trainer.cpu_offload,
            threads=trainer.threads_per_rank,
            rank=rank,
            world_size=trainer.learner_ranks,
            replicas=1 if mesh is None else mesh.replicate,
            context=1 if mesh is None else mesh.context,
            expert=1 if mesh is None else mesh.expert,
        )
        for rank in range(trainer.learner_ranks)
    ]


def _publish_settings(spec: RLRunSpec) -> Weights:
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
        model_uri=inputs.model_uri,
        brokers=dict(settings.brokers),
        templates={role.name: role.template for role in spec.roles.environments},
        rewards_target=settings.rewards_target,
        score_timeout_s=sum(timeouts) + QUEUE_MARGIN_S,
        storage=spec.storage,
        outage_s=spec.weights.timeout_seconds,
        stores_contents=True,
        traces_file=settings.traces_file,
        otlp_endpoint=spec.observability.otlp_endpoint,
    )


def _compactor_config(settings: Settings, resolved: ResolvedRun, epoch: int) -> CompactorConfig:
    return CompactorConfig(
        run=resolved.uid,
        epoch=epoch,
        storage=resolved.spec.storage,
        folder=settings.scratch / "keeper",
        weights=resolved.spec.weights,
    )


def _plan_reporter(settings: Settings, resolved: ResolvedRun) -> PlanReporter:
    templates = {role.name: role.template for role in resolved.spec.roles.environments}
    images = TaskImageReader(storage=resolved.spec.storage)
    return PlanReporter(resolved.uid, settings.brokers, templates, images=images)


def _engines(settings: Settings, spec: RLRunSpec) -> Engines:
    engines = Engines.of(settings.inference_targets, spec.weights)
    role = spec.roles.inference
    if role is not None:
        engines.num_for_evaluation = role.evaluation_replicas
        if role.autoscaling.mode == "StepTime":
            engines.limit = role.replicas
    return engines


@contextlib.asynccontextmanager
async def _run_servers(settings: Settings, run: Run) -> AsyncIterator[None]:
    """Serve gRPC and probes while the block runs."""
    server = Server([NAME], settings.host, settings.port)
    service = RunService(run.reporter.reports, run.commands)
    run_pb2_grpc.add_RunServiceServicer_to_server(service, server.grpc_server)
    probes = Probes(settings.probe_port, settings.host)
    await server.start()
    await probes.start()
    await server.set_ready()
    probes.ready = True
    try:
        yield
    finally:
        probes.ready = False
        await server.stop()
        await probes.stop()


def _announce_start(run: Run, opened: OpenedRun) -> None:
    run.reporter.set_state(run_pb2.RUN_STATE_LOADING)
    run.reporter.update_status()
    for problem in opened.problems:
        run.reporter.record_event("CheckpointCorrupt", f"skipped: {problem}", warning=True)
    if opened.is_restored:
        where = f"restored to step {run.progress.cursor.global_step}, as checkpointing.resume says"
        run.reporter.record_event("PutBack", f"{where}; later checkpoints stay in the store")
    log.info(
        "epoch %d of run %s, %s from step %d",
        opened.epoch,
        run.progress.resolved.name,
        "new" if opened.is_new else "resumed",
        run.progress.cursor.global_step,
    )


async def _forward_stop(stop: asyncio.Event, commands: RunCommands) -> None:
    await stop.wait()
    commands.request_stop()


async def _train_until_stopped(
    stop: asyncio.Event, run: Run, inputs: Inputs, opened: OpenedRun, routing: RoutingBroadcast
) -> int:
    """Train the run, and leave its last report to be read; return the exit code."""
    tasks = [
        asyncio.create_task(_forward_stop(stop, run.commands), name="stop"),
        asyncio.create_task(routing.run(), name="routing"),
        asyncio.create_task(
            run.publishing.engines.lent.run(lambda: run.commands.lenders), name="lent-engines"
        ),
    ]
    code = await _train(run, inputs, opened)
    if code == 0:
        await stop.wait()
    else:
        await asyncio.sleep(FINAL_REPORT_S)
    for task in tasks:
        task.cancel()
    return code


async def _train(run: Run, inputs: Inputs, opened: OpenedRun) -> int:
    try:
        is_done = await train(run, inputs.task_sets, checkpoint=opened.checkpoint)
    except Exception as caught:  # noqa: BLE001 - the edge of the process
        return report_failure(run.reporter, unwrap_ray_error(root_cause(caught)))
    if is_done:
        report_done(run.reporter)
    else:
        run.reporter.set_state(run_pb2.RUN_STATE_SUSPENDED)
    return 0


def report_failure(reporter: RunReporter, error: BaseException) -> int:
    """Report the failure that ends this process; return the exit code."""
    log.error("the run stops", exc_info=error)
    status = reporter.status
    status.reason = error.reason if isinstance(error, EtudeError) else type(error).__name__
    status.message = str(error)[:2048]
    reporter.record_event(status.reason, status.message, warning=True)
    reporter.recorder.write_rows_now()
    if isinstance(error, UserError):
        reporter.set_state(run_pb2.RUN_STATE_FAILED)
        return EXIT_CONFIGURATION
    if isinstance(error, FencedError):
        # Another controller runs it now: this process must neither fail the run nor restart.
        reporter.set_state(run_pb2.RUN_STATE_DRAINING)
        return 0
    if isinstance(error, _FINAL):
        reporter.set_state(run_pb2.RUN_STATE_FAILED)
        return 0
    reporter.reports.mark_changed()
    # Training itself waits for the store. Other failures, as of the checkpoint that ends a phase,
    # are repeated by the next process and may recur for ever: these restarts count. If the store
    # is unreachable, the next process finds that out while it loads, and is not counted.
    return exit_code(error) if status.state == run_pb2.RUN_STATE_LOADING else 1
