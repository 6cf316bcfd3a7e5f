"""The index of a set of files, and how its vectors were made."""

from collections.abc import Mapping
from dataclasses import dataclass

from etude.agent.patterns import is_hidden
from etude.agent.search.contents import digest
from etude.agent.search.hashed import HashedNull
from etude.agent.search.index import Index, build, entries
from etude.agent.search.vectors import Embedder


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What workspaces that differ in some files share."""

    embedder: Embedder
    index: Index
    digests: Mapping[str, bytes]
    """SHA-256 of every file that is not hidden, searched or not."""


def base(files: Mapping[str, bytes], embedder: Embedder | None) -> Base:
    """The index of some files, now; without an embedder, by the one that is always there.

    Raises:
        UnavailableError: there is no parser on this machine.
    """
    embedder = embedder or HashedNull()
    return Base(
        embedder=embedder,
        index=build(entries(files, embedder), embedder.num_components),
        digests={path: digest(data) for path, data in files.items() if not is_hidden(path)},
    )
