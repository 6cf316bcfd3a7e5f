"""What the exit code says of a trainer that could not begin."""

from etude.common.blobs import is_away
from etude.common.ending import EXIT_TRY_AGAIN


def exit_code(error: BaseException) -> int:
    """75 for a store that is away, which is waited for; 1 for what waiting would not cure.

    A store that says no is such a thing: asking for ever would hold the nodes of the run.
    """
    return EXIT_TRY_AGAIN if is_away(error) else 1
