"""What a pool's searches are made with, or why its node cannot start."""

from pathlib import Path

from etude.agent.search.backends import backend
from etude.agent.search.vectors import Embedder
from etude.common.api.pool import SearchSettings, StoreAccess
from etude.common.files import materialise


def embedder(search: SearchSettings, scratch: Path, access: StoreAccess) -> Embedder:
    """The embedder that the pool names.

    Raises:
        UserError: this node has not that one.
        CorruptError: a file of its name holds something else.
    """
    models = materialise(search.models, scratch, access) if search.models else scratch
    return backend(search.backend, models)
