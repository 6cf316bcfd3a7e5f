"""Commands for the controller of a run."""

from collections.abc import Iterator

from etude.common.api.kinds import RLRun
from etude.operator import names
from etude.operator.actions import SendCommand
from etude.operator.builders import run_spec
from etude.operator.builders.addresses import role_address
from etude.operator.manifests import digest
from etude.operator.runs.capacity import engine_count, lenders
from etude.operator.runs.lifecycle import limits
from etude.operator.runs.observe import ObservedRun
from etude.v1 import run_pb2


def due_commands(run: RLRun, observed: ObservedRun) -> Iterator[SendCommand]:
    """Commands that are due now; the controller ignores one that it has already carried out."""
    report, intent = observed.report, run.status.intent
    if (
        not report.is_connected
        or report.status is None
        or report.status.state in limits.FINISHED_STATES
    ):
        return
    if intent is not None:
        yield from _final_commands(run)
        return
    for asked in observed.requests:
        checkpoint = run_pb2.CheckpointNow(request=asked.metadata.uid)
        request = run_pb2.CommandRequest(checkpoint=checkpoint)
        yield command(run, request, f"checkpoint/{asked.metadata.uid}", 0)
    scale = engine_count.scale_command(run, report.status)
    if scale is not None and run.status.engines is not None:
        what = f"engines/{scale.scale_engines.replicas}"
        yield command(run, scale, what, run.status.engines.version)
    lend = lenders.lenders_command(observed.lenders, report.status)
    if lend is not None:
        what = digest({"lenders": list(observed.lenders)})
        yield command(run, lend, f"lenders/{what}", report.status.policy_version)
    if report.status.observed_generation < run.metadata.generation:
        request = run_pb2.CommandRequest(
            configure=run_pb2.ConfigureRun(
                spec_json=run_spec.resolved_spec(run).model_dump_json(
                    by_alias=True, exclude_none=True
                ),
                generation=run.metadata.generation,
            )
        )
        yield command(run, request, "configure", run.status.attempt)


def command(run: RLRun, request: run_pb2.CommandRequest, what: str, number: int) -> SendCommand:
    """A command under an id that lets the controller recognise a repeat."""
    metadata = run.metadata
    request.command_id = f"{metadata.uid}/{metadata.generation}/{what}/{number}"
    return SendCommand(target=role_address(run, names.TRAINER), request=request)


def _final_commands(run: RLRun) -> Iterator[SendCommand]:
    intent = run.status.intent
    if intent is not None and intent.type == "Suspend":
        suspend = run_pb2.SuspendRun(checkpoint=True)
        yield command(run, run_pb2.CommandRequest(suspend=suspend), "suspend", intent.generation)
    if intent is not None and intent.type == "Salvage":
        wanted = run.spec.checkpointing.on_failure == "BestEffort"
        suspend = run_pb2.SuspendRun(checkpoint=wanted, is_failure=True)
        yield command(run, run_pb2.CommandRequest(suspend=suspend), "salvage", intent.generation)
