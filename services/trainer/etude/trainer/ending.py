"""What the exit code says of a trainer that could not begin."""

from etude.common.blobs import RefusedError
from etude.common.ending import EXIT_TRY_AGAIN
from etude.common.errors import StoreError


def exit_code(error: BaseException) -> int:
    """75 for a store that is away, which is waited for; 1 for what waiting would not cure.

    A store that says no is such a thing: asking for ever would hold the nodes of the run.
    """
    is_away = isinstance(error, StoreError) and not isinstance(error, RefusedError)
    return EXIT_TRY_AGAIN if is_away else 1
