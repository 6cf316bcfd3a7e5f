"""Success targets that end a phase early, and gates between phases."""

from collections.abc import Mapping
from typing import ClassVar

from etude.common.api.run.phase_goals import Gate
from etude.common.api.run.phases import Phase
from etude.trainer.controller.checkpoints.manager import CheckpointManager
from etude.trainer.controller.checkpoints.state import EvaluationResult
from etude.trainer.controller.progress import RunFailedError
from etude.trainer.controller.reporting.reporter import RunReporter
from etude.v1 import run_pb2

GATE_NOT_MET = "GateNotMet"
TARGET_REACHED = "TargetReached"


class GateNotMetError(RunFailedError):
    """A gate that stops the run was not met."""

    reason: ClassVar[str] = GATE_NOT_MET


def record_measurement(reporter: RunReporter, figures: Mapping[str, float]) -> None:
    """Record a step's figures; end the phase once they meet its success policy."""
    progress = reporter.progress
    policy, cursor = progress.phase.success_policy, progress.cursor
    if policy is None:
        return
    window = [*progress.figures.window, figures[policy.metric]][-policy.window_steps :]
    progress.figures.window = window
    mean = sum(window) / len(window)
    if len(window) == policy.window_steps and policy.holds(mean):
        cursor.ends[cursor.phase] = cursor.step
        summary = f"{policy.metric} {mean:.4g} over {len(window)} steps: {policy.op} {policy.value}"
        reporter.record_event(
            TARGET_REACHED, f"phase {cursor.phase} ends at step {cursor.step}: {summary}"
        )


def gate_failure(gate: Gate, evaluations: Mapping[str, EvaluationResult]) -> str:
    """Explain why a gate does not hold; empty if it does."""
    result = evaluations.get(gate.evaluation)
    figure = None
    if result is not None:
        figure = result.success if gate.metric == "Success" else result.greedy_success
    requirement = f"{gate.metric} of {gate.evaluation} must be {gate.op} {gate.value}"
    if figure is None:
        return f"{requirement}, and was not measured"
    return "" if gate.holds(figure) else f"{requirement}, and is {figure:.4g}"


async def passes_gate(checkpoints: CheckpointManager, phase: Phase) -> bool:
    """Check the gate of a finished phase; False suspends the run.

    Raises:
        GateNotMetError: the gate ends the run.
        StoreError: the state could not be saved.
    """
    gate, progress, reporter = phase.gate, checkpoints.progress, checkpoints.reporter
    if gate is None:
        return True
    why = gate_failure(gate, progress.figures.evaluations)
    progress.cursor.gates[phase.name] = "NotMet" if why else "Met"
    reporter.update_status()
    if not why:
        return True
    text = f"phases[].gate of {phase.name}: {why}"
    reporter.record_event(GATE_NOT_MET, text, warning=True)
    if gate.on_fail == "Continue":
        return True
    if checkpoints.saver.last_step != progress.cursor.global_step:
        await checkpoints.save_checkpoint("PhaseEnd")
    if gate.on_fail == "Stop":
        raise GateNotMetError(text)
    status = reporter.status
    status.reason, status.message = GATE_NOT_MET, text
    return False


def report_done(reporter: RunReporter) -> None:
    """Report the end of a run, and a target that ended it early."""
    progress = reporter.progress
    last = progress.resolved.spec.phases[-1].name
    if last in progress.cursor.ends:
        status = reporter.status
        status.reason = TARGET_REACHED
        status.message = f"phase {last} reached its target at step {progress.cursor.ends[last]}"
    reporter.set_state(run_pb2.RUN_STATE_DONE)
