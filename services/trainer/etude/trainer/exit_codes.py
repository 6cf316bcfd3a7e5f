"""Exit codes of the trainer process."""

from etude.common.blobs import is_unavailable
from etude.common.process import EXIT_TRY_AGAIN


def exit_code(error: BaseException) -> int:
    """75 for an unreachable store, so that the restart is not counted; 1 for everything else.

    A store that refuses access counts as an error: retrying for ever would hold the run's nodes.
    """
    return EXIT_TRY_AGAIN if is_unavailable(error) else 1
