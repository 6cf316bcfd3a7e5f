"""Embedders by the id that a policy was trained with: that one, or none."""

import re
from pathlib import Path

from etude.agent.search.contents import HASHED
from etude.agent.search.hashed import HashedNull
from etude.agent.search.minilm import ID as MINILM
from etude.agent.search.minilm import MiniLm
from etude.agent.search.trained import TrainedTable
from etude.agent.search.vectors import Embedder
from etude.common.errors import Problem, UserError

_TRAINED = re.compile(r"trained-[0-9a-f]{16}")


class SearchBackendError(UserError):
    """The vectors that a policy was trained with cannot be had here; no others will do."""

    def __init__(self, name: str, what: str, fix: str) -> None:
        where = f"search backend {name[:80]}"
        super().__init__(Problem(reason="SearchBackend", what=what, where=where, fix=fix))


def file_of(name: str, folder: Path) -> Path:
    """Where a trained table of this id lies."""
    return folder / f"{name}.npz"


def backend(name: str, folder: Path) -> Embedder:
    """The embedder of this id.

    Args:
        name: an id.
        folder: where trained tables lie.

    Raises:
        SearchBackendError: there is no such one here, or the file has another's content.
        UserError: the sentence model is not installed.
        CorruptError: the file holds no table.
    """
    if name == HASHED:
        return HashedNull()
    if name == MINILM:
        return MiniLm.load()
    if not _TRAINED.fullmatch(name):
        known = f"{HASHED}, {MINILM} and trained-… are known"
        raise SearchBackendError(name, "there is no such backend", f"name one: {known}")
    path = file_of(name, folder)
    if not path.is_file():
        raise SearchBackendError(name, f"{path} does not exist", "train it: make search-model")
    found = TrainedTable.load(path)
    if found.id != name:
        raise SearchBackendError(name, f"{path} holds {found.id}", "copy the file of that name")
    return found
