"""Resume point of a run: the checkpoint from which it continues when it gets pods again."""

from collections.abc import Sequence

from etude.common.api.kinds import Checkpoint, RLRun
from etude.common.api.run.status import Resumption
from etude.operator.checkpoints.status import is_ready
from etude.operator.runs.checkpoints import lineage, retention

FIELD = "spec.checkpointing.resumeFrom.name"


def is_undecided(run: RLRun) -> bool:
    """The spec asks for another resume point than was decided."""
    before = run.status.resumption or Resumption(mode="Latest")
    return (before.mode, before.asked) != _requested(run)


def decide_resumption(run: RLRun, checkpoints: Sequence[Checkpoint]) -> Resumption | None:
    """The resume decision to record for a run that is about to get pods.

    A named checkpoint that is not Ready stays undecided: a queue may evict a run that names one,
    and resume_problem() refuses it once the pods are gone.

    Args:
        run: about to get pods, or queued for them.
        checkpoints: of the run, newest first.
    """
    before = run.status.resumption
    if not is_undecided(run):
        return before
    mode, requested = _requested(run)
    base = before or Resumption()
    undecided = base.model_copy(update={"mode": mode, "asked": requested})
    if mode == "Latest":
        return undecided if before is not None else None
    target = _resume_target(run, [c for c in checkpoints if is_ready(c)])
    if target is None and mode == "Named":
        return before
    if target is None and mode == "Best":
        return undecided
    if run.status.start_time is None:
        return undecided  # it is at its start
    return Resumption(
        number=base.number + 1,
        mode=mode,
        asked=requested,
        name="" if target is None else target.metadata.name,
        step=None if target is None else target.saved_state.step,
        branch=0 if target is None else target.saved_state.branch,
        earlier=lineage.resume_points(base)[-lineage.MAX_EARLIER :],
    )


def _resume_target(run: RLRun, verified: Sequence[Checkpoint]) -> Checkpoint | None:
    """The checkpoint to resume from; None for the start weights, or while it is missing."""
    mode, requested = _requested(run)
    match mode:
        case "Best":
            return next(
                iter(retention.best_checkpoints(verified, run.spec.checkpointing.keep_best)), None
            )
        case "Named":
            return next((c for c in verified if c.metadata.name == requested), None)
        case _:
            return None


def reset_decision(resumption: Resumption | None) -> Resumption | None:
    """The decision of a run that its user suspends: it is made again when the run gets pods."""
    return None if resumption is None else resumption.model_copy(update={"mode": "", "asked": ""})


def resume_problem(run: RLRun, checkpoints: Sequence[Checkpoint]) -> str:
    """The sentence that refuses the named resume point; empty where it is fine or in use."""
    reference = run.spec.checkpointing.resume_from
    if reference is None or run.status.active.since is not None or not is_undecided(run):
        return ""
    checkpoint = next((c for c in checkpoints if c.metadata.name == reference.name), None)
    if checkpoint is None:
        return (
            f"{FIELD}: this run has no Checkpoint {reference.name}; to start from another run's"
            " model, set model.checkpointRef"
        )
    if not is_ready(checkpoint):
        phase = checkpoint.status.phase or "not verified yet"
        return f"{FIELD}: {reference.name} is {phase}, not Ready"
    return ""


def _requested(run: RLRun) -> tuple[str, str]:
    given = run.spec.checkpointing
    return given.resume, given.resume_from.name if given.resume_from is not None else ""
