"""Checkpoint lineage of a run: its chain of resumes, and the checkpoints off that chain."""

from etude.common.api.kinds import Checkpoint
from etude.common.api.run.status import Resumption, RollbackRequest

MAX_EARLIER = 64
"""Earlier resume decisions that a run's status keeps."""


def is_off_lineage(checkpoint: Checkpoint, resumption: Resumption | None) -> bool:
    """The run resumed from an earlier checkpoint, so this one is off its lineage."""
    return is_off_lineage_at(checkpoint.saved_state.branch, checkpoint.saved_state.step, resumption)


def is_off_lineage_at(branch: int, step: int, resumption: Resumption | None) -> bool:
    """A checkpoint of this branch and step is off the run's lineage.

    The lineage is the path from the run's present branch to its start: of each branch on it,
    the checkpoints up to the step at which the next branch began. For decisions that are no
    longer recorded, the steps alone decide.
    """
    if resumption is None or branch >= resumption.number:
        return False
    present = resumption.number
    for at in reversed(resume_points(resumption)):
        if at.number != present:
            continue
        if at.step is None or step > at.step:
            return True
        present = at.branch
        if branch >= present:
            break
    return branch > present


def resume_points(resumption: Resumption) -> tuple[RollbackRequest, ...]:
    """Every resume decision of the run, oldest first, the newest included."""
    if not resumption.number:
        return ()
    newest = RollbackRequest(
        number=resumption.number, step=resumption.step, branch=resumption.branch
    )
    return (*resumption.earlier, newest)
