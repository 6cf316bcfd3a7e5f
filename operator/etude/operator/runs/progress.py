"""Progress of the phases of a run."""

from etude.common.api.kinds import RLRun
from etude.common.api.run.phases import Phase
from etude.common.api.run.status import PhaseStatus
from etude.v1 import run_pb2


def phases(
    run: RLRun, report: run_pb2.RunStatus | None, *, is_over: bool
) -> tuple[PhaseStatus, ...]:
    """Status of every phase of the spec, by the controller's newest report.

    Args:
        run: with the status so far, which has the progress reported before.
        report: of the controller; None while there is none.
        is_over: the run is finished, and no further phase begins.
    """
    said = {each.name: each for each in report.phases} if report is not None else {}
    before = {each.name: each for each in run.status.phases}
    return tuple(
        _ended(
            _told(phase, said[phase.name])
            if phase.name in said
            else _known(phase, before.get(phase.name), is_heard=bool(said)),
            is_over=is_over,
        )
        for phase in run.spec.phases
    )


def _told(phase: Phase, said: run_pb2.PhaseProgress) -> PhaseStatus:
    found = {
        "name": phase.name,
        "state": "Done" if said.is_done else "Active",
        "step": said.step,
        "target": said.target_step,
        "gate": None if phase.gate is None else said.gate or "Pending",
    }
    return PhaseStatus.model_validate(found)


def _known(phase: Phase, before: PhaseStatus | None, *, is_heard: bool) -> PhaseStatus:
    """A phase that the report does not name: it has not started, if there is a report."""
    if before is not None and not is_heard:
        return before.model_copy(update={"target": phase.max_steps})
    gate = None if phase.gate is None else "Pending"
    return PhaseStatus.model_validate({"name": phase.name, "target": phase.max_steps, "gate": gate})


def _ended(phase: PhaseStatus, *, is_over: bool) -> PhaseStatus:
    is_skipped = is_over and phase.state == "Waiting"
    return phase.model_copy(update={"state": "Skipped"}) if is_skipped else phase
