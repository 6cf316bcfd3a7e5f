"""Success targets that end a phase early, and gates between phases."""

from collections.abc import Mapping
from typing import ClassVar

from etude.common.api.run.phase_goals import Gate
from etude.common.api.run.phases import Phase
from etude.trainer.controller.checkpoints.state import EvaluationResult
from etude.trainer.controller.run import Run, RunFailedError
from etude.v1 import run_pb2

GATE_NOT_MET = "GateNotMet"
TARGET_REACHED = "TargetReached"


class GateNotMetError(RunFailedError):
    """A gate that stops the run was not met."""

    reason: ClassVar[str] = GATE_NOT_MET


def record_measurement(run: Run, figures: Mapping[str, float]) -> None:
    """Record a step's figures; end the phase once they meet its success policy.

    Args:
        run: after the step.
        figures: of the step, by their names in the spec.
    """
    policy, cursor = run.phase.success_policy, run.cursor
    if policy is None:
        return
    window = [*run.figures.window, figures[policy.metric]][-policy.window_steps :]
    run.figures.window = window
    mean = sum(window) / len(window)
    if len(window) == policy.window_steps and policy.holds(mean):
        cursor.ends[cursor.phase] = cursor.step
        words = f"{policy.metric} {mean:.4g} over {len(window)} steps: {policy.op} {policy.value}"
        run.record_event(
            TARGET_REACHED, f"phase {cursor.phase} ends at step {cursor.step}: {words}"
        )


def gate_failure(gate: Gate, evaluations: Mapping[str, EvaluationResult]) -> str:
    """Explain why a gate does not hold; empty if it does."""
    found = evaluations.get(gate.evaluation)
    figure = None
    if found is not None:
        figure = found.success if gate.metric == "Success" else found.greedy_success
    wanted = f"{gate.metric} of {gate.evaluation} must be {gate.op} {gate.value}"
    if figure is None:
        return f"{wanted}, and was not measured"
    return "" if gate.holds(figure) else f"{wanted}, and is {figure:.4g}"


async def passes_gate(run: Run, phase: Phase) -> bool:
    """Check the gate of a finished phase; False suspends the run.

    Raises:
        GateNotMetError: the gate ends the run.
        StoreError: the state could not be saved.
    """
    gate = phase.gate
    if gate is None:
        return True
    why = gate_failure(gate, run.figures.evaluations)
    run.cursor.gates[phase.name] = "NotMet" if why else "Met"
    run.update_status()
    if not why:
        return True
    words = f"phases[].gate of {phase.name}: {why}"
    run.record_event(GATE_NOT_MET, words, warning=True)
    if gate.on_fail == "Continue":
        return True
    if run.saver.last_step != run.cursor.global_step:
        await run.save_checkpoint("PhaseEnd")
    if gate.on_fail == "Stop":
        raise GateNotMetError(words)
    status = run.reports.status
    status.reason, status.message = GATE_NOT_MET, words
    return False


def report_done(run: Run) -> None:
    """Report the end of a run, and a target that ended it early."""
    last = run.resolved.spec.phases[-1].name
    if last in run.cursor.ends:
        status = run.reports.status
        status.reason = TARGET_REACHED
        status.message = f"phase {last} reached its target at step {run.cursor.ends[last]}"
    run.reports.set_state(run_pb2.RUN_STATE_DONE)
