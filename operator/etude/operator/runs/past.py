"""Which checkpoints are a run's past, and which it left when it was put back."""

from etude.common.api.kinds import Checkpoint
from etude.common.api.status import Resumption


def is_left(checkpoint: Checkpoint, resumption: Resumption | None) -> bool:
    """Whether the run was put back to what is older than a checkpoint, which is no past of it."""
    if resumption is None or checkpoint.saved.branch >= resumption.number:
        return False
    return resumption.step is None or checkpoint.saved.step > resumption.step
