"""Which checkpoints are a run's past, and which it left when it was put back."""

from etude.common.api.kinds import Checkpoint
from etude.common.api.status import PutBack, Resumption

KNOWN = 64
"""How many decisions a run's status keeps beside its newest."""


def is_left(checkpoint: Checkpoint, resumption: Resumption | None) -> bool:
    """Whether the run was put back to what is older than a checkpoint, which is no past of it."""
    return is_left_at(checkpoint.saved.branch, checkpoint.saved.step, resumption)


def is_left_at(branch: int, step: int, resumption: Resumption | None) -> bool:
    """Likewise of what was written after so many put-backs and steps.

    The run's past is the way from its present branch to its start: of each branch that lies on
    it, what was written up to the step at which the next one began. Of decisions that are no
    longer known, the steps alone tell.
    """
    if resumption is None or branch >= resumption.number:
        return False
    present = resumption.number
    for at in reversed(put_backs(resumption)):
        if at.number != present:
            continue
        if at.step is None or step > at.step:
            return True
        present = at.branch
        if branch >= present:
            break
    return branch > present


def put_backs(resumption: Resumption) -> tuple[PutBack, ...]:
    """Where the run was put back to each time, oldest first, the newest decision included."""
    if not resumption.number:
        return ()
    newest = PutBack(number=resumption.number, step=resumption.step, branch=resumption.branch)
    return (*resumption.earlier, newest)
