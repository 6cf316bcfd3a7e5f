"""Sources of workspaces: folders by URI, read once and cached; the embedder of their searches."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from etude.agent.search.codebase import Codebase
from etude.agent.search.contents import HASHED_ID
from etude.agent.search.remote import RemoteCodebase
from etude.agent.search.shared_index import SharedIndex
from etude.common.api.pool.spec import SearchSettings
from etude.common.api.storage import StoreAccess
from etude.common.errors import Problem, UserError
from etude.common.harbor.task import read_files
from etude.common.stores import local_folder
from etude.envserver.storage import trees
from etude.envserver.storage.trees import File, Tree

if TYPE_CHECKING:
    from etude.agent.search.embedders.interface import Embedder

CACHE_BYTES = 256 << 20
MAX_SOURCE_BYTES = 64 << 20
EMPTY = "empty:"
"""The URI of a workspace without files."""
IMAGE_FILES = frozenset(
    {"Dockerfile", ".dockerignore", "docker-compose.yaml", "docker-compose.yml"}
)
"""Files that describe the image, next to the files of the workspace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceSource:
    """The first files of a workspace. Content behind a URI never changes."""

    uri: str
    tree: Tree
    key: str
    """Identity of the tree."""
    num_bytes: int
    index: SharedIndex
    """Search index of all workspaces that begin with these files."""
    search_service: str = ""
    """Address of the service that answers searches; empty: this process does."""

    def open_codebase(self) -> Codebase:
        """Open the code search of a workspace that begins with these files."""
        if not self.search_service:
            return Codebase(self.index)
        backend = HASHED_ID if self.index.embedder is None else self.index.embedder.id
        return RemoteCodebase(self.index, address=self.search_service, backend=backend)


@dataclass(slots=True)
class WorkspaceSources:
    """The sources in use, least recently used out first."""

    scratch: Path
    """Folder for copies of an object store's prefixes."""
    access: StoreAccess = field(default_factory=StoreAccess)
    """Access to that store."""
    cache_bytes: int = CACHE_BYTES
    embedder: "Embedder | None" = None
    """Embedder of searches, the one that the policy was trained with; None is the built-in one."""
    search_service: str = ""
    """Address of the service that answers searches; empty: this process does."""
    _kept: OrderedDict[str, WorkspaceSource] = field(default_factory=OrderedDict)
    _loading: dict[str, asyncio.Task[WorkspaceSource]] = field(default_factory=dict)

    async def get(self, uri: str) -> WorkspaceSource:
        """The source behind a URI.

        Raises:
            UserError: it is missing, or holds what no workspace may hold.
        """
        if uri in self._kept:
            self._kept.move_to_end(uri)
            return self._kept[uri]
        if uri not in self._loading:
            task = asyncio.create_task(asyncio.to_thread(self._read, uri), name=f"source {uri}")
            task.add_done_callback(lambda _: self._loading.pop(uri, None))
            self._loading[uri] = task
        source = await asyncio.shield(self._loading[uri])
        self._keep(source)
        return source

    def _keep(self, source: WorkspaceSource) -> None:
        self._kept[source.uri] = source
        while (
            len(self._kept) > 1 and sum(s.num_bytes for s in self._kept.values()) > self.cache_bytes
        ):
            self._kept.popitem(last=False)

    def _read(self, uri: str) -> WorkspaceSource:
        if uri == EMPTY:
            return self._source(uri, {})
        folder = local_folder(uri, self.scratch, self.access)
        if not folder.is_dir():
            raise _invalid_workspace(uri, "is not a folder")
        files = read_files(folder)
        num_bytes = sum(map(len, files.values()))
        if num_bytes > MAX_SOURCE_BYTES:
            raise _invalid_workspace(uri, f"holds {num_bytes} bytes, more than {MAX_SOURCE_BYTES}")
        tree = {
            path: File(content, bool((folder / path).stat().st_mode & 0o100))
            for path, content in files.items()
            if path not in IMAGE_FILES
        }
        return self._source(uri, tree)

    def _source(self, uri: str, tree: Tree) -> WorkspaceSource:
        contents = {path: file.content for path, file in tree.items()}
        return WorkspaceSource(
            uri=uri,
            tree=tree,
            key=trees.tree_identity(tree),
            num_bytes=sum(map(len, contents.values())),
            index=SharedIndex(contents, self.embedder),
            search_service=self.search_service,
        )


def _invalid_workspace(uri: str, what: str) -> UserError:
    fix = "point the workspace at a folder of plain files"
    return UserError(Problem(reason="InvalidWorkspace", what=what, where=uri, fix=fix))


if TYPE_CHECKING:
    from etude.agent.search.embedders.interface import Embedder


def load_embedder(search: SearchSettings, scratch: Path, access: StoreAccess) -> "Embedder | None":
    """Load the embedder that the pool names; None for the built-in one.

    Raises:
        UserError: this host does not have it.
        CorruptError: its file is damaged.
    """
    models = local_folder(search.models, scratch, access) if search.models else scratch
    if search.backend == HASHED_ID:
        return None
    from etude.agent.search.embedders.registry import load_embedder  # noqa: PLC0415 - loads numpy

    return load_embedder(search.backend, models)
