"""Registry of embedders by id; a policy gets the embedder that it was trained with."""

import re
from pathlib import Path

from etude.agent.search.contents import HASHED_ID
from etude.agent.search.embedders.hashed import HashedEmbedder
from etude.agent.search.embedders.interface import Embedder
from etude.agent.search.embedders.minilm import ID as MINILM
from etude.agent.search.embedders.minilm import MiniLmEmbedder
from etude.agent.search.embedders.trained import TrainedEmbedder
from etude.common.errors import Problem, UserError

_TRAINED = re.compile(r"trained-[0-9a-f]{16}")


class SearchBackendError(UserError):
    """The embedder that a policy was trained with is not available here."""

    def __init__(self, name: str, what: str, fix: str) -> None:
        where = f"search backend {name[:80]}"
        super().__init__(Problem(reason="SearchBackend", what=what, where=where, fix=fix))


def encoder_path(name: str, folder: Path) -> Path:
    """Path of the trained encoder with this id."""
    return folder / f"{name}.npz"


def load_embedder(name: str, folder: Path) -> Embedder:
    """Load the embedder with this id.

    Args:
        name: an id.
        folder: of trained encoders.

    Raises:
        SearchBackendError: it is not here, or the file has the content of another.
        UserError: the sentence model is not installed.
        CorruptError: the file is not an encoder.
    """
    if name == HASHED_ID:
        return HashedEmbedder()
    if name == MINILM:
        return MiniLmEmbedder.load()
    if not _TRAINED.fullmatch(name):
        known = f"{HASHED_ID}, {MINILM} and trained-… are known"
        raise SearchBackendError(name, "there is no such backend", f"name one: {known}")
    path = encoder_path(name, folder)
    if not path.is_file():
        raise SearchBackendError(name, f"{path} does not exist", "train it: make search-model")
    found = TrainedEmbedder.load(path)
    if found.id != name:
        raise SearchBackendError(name, f"{path} holds {found.id}", "copy the file of that name")
    return found
