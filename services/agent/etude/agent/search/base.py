"""Base index: the index of a set of files, with its embedder."""

from collections.abc import Mapping
from dataclasses import dataclass

from etude.agent.patterns import is_hidden
from etude.agent.search.contents import digest
from etude.agent.search.hashed import HashedNull
from etude.agent.search.index import Index, build, entries
from etude.agent.search.vectors import Embedder


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """Index that workspaces with few changed files share."""

    embedder: Embedder
    index: Index
    digests: Mapping[str, bytes]
    """SHA-256 of every file that is not hidden, searched or not."""


def base(files: Mapping[str, bytes], embedder: Embedder | None) -> Base:
    """Build the index of some files; by default with the hashed embedder.

    Raises:
        UnavailableError: there is no parser on this machine.
    """
    embedder = embedder or HashedNull()
    return Base(
        embedder=embedder,
        index=build(entries(files, embedder), embedder.num_components),
        digests={path: digest(data) for path, data in files.items() if not is_hidden(path)},
    )
