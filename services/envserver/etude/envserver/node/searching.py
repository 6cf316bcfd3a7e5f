"""What a pool's searches are made with, or why its node cannot start."""

from pathlib import Path
from typing import TYPE_CHECKING

from etude.agent.search.contents import HASHED
from etude.common.api.pool import SearchSettings, StoreAccess
from etude.common.files import materialise

if TYPE_CHECKING:
    from etude.agent.search.vectors import Embedder


def embedder(search: SearchSettings, scratch: Path, access: StoreAccess) -> "Embedder | None":
    """The embedder that the pool names; nothing for the one that is always there.

    Raises:
        UserError: this node has not that one.
        CorruptError: a file of its name holds something else.
    """
    models = materialise(search.models, scratch, access) if search.models else scratch
    if search.backend == HASHED:
        return None
    from etude.agent.search.backends import backend  # noqa: PLC0415 - loads numpy

    return backend(search.backend, models)
