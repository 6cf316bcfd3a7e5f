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
from etude.envserver.host.task_images import TaskTemplate
from etude.envserver.storage import folders, trees
from etude.envserver.storage.folders import FolderLimits, TooLargeError
from etude.envserver.storage.trees import File, Tree

if TYPE_CHECKING:
    from etude.agent.search.embedders.interface import Embedder

CACHE_BYTES = 256 << 20
MAX_SOURCE_BYTES = 64 << 20
FIRST_FILES = FolderLimits(max_files=folders.DIFF.max_files, max_bytes=MAX_SOURCE_BYTES)
"""Limits on what an image's working folder gives a workspace."""
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

    async def get(self, uri: str, task: TaskTemplate | None = None) -> WorkspaceSource:
        """The source behind a URI.

        Args:
            uri: of the task's files.
            task: its image, whose working folder's files are there first.

        Raises:
            UserError: it is missing, or holds what no workspace may hold.
        """
        key = uri if task is None else f"{uri} {task.image}"
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        if key not in self._loading:
            first_files = None if task is None else task.first_files
            read = asyncio.to_thread(self._read, uri, first_files)
            loading = asyncio.create_task(read, name=f"source {key}")
            loading.add_done_callback(lambda _: self._loading.pop(key, None))
            self._loading[key] = loading
        source = await asyncio.shield(self._loading[key])
        self._keep(key, source)
        return source

    def _keep(self, key: str, source: WorkspaceSource) -> None:
        self._kept[key] = source
        while (
            len(self._kept) > 1 and sum(s.num_bytes for s in self._kept.values()) > self.cache_bytes
        ):
            self._kept.popitem(last=False)

    def _read(self, uri: str, first_files: Path | None) -> WorkspaceSource:
        """Read the files of an image and of a task.

        Raises:
            UserError: they are more than a workspace may have.
        """
        tree = {} if first_files is None else _read_first_files(uri, first_files)
        if uri != EMPTY:
            tree |= self._read_folder(uri)
        num_bytes = sum(len(file.content) for file in tree.values())
        if num_bytes > MAX_SOURCE_BYTES:
            what = f"holds {num_bytes} bytes, more than {MAX_SOURCE_BYTES}"
            raise UserError(_invalid_workspace(uri, what))
        return self._source(uri, tree)

    def _read_folder(self, uri: str) -> dict[str, File]:
        """Read the task's own files.

        Raises:
            UserError: there is no such folder.
        """
        folder = local_folder(uri, self.scratch, self.access)
        if not folder.is_dir():
            raise UserError(_invalid_workspace(uri, "is not a folder"))
        return {
            path: File(content, bool((folder / path).stat().st_mode & 0o100))
            for path, content in read_files(folder).items()
            if path not in IMAGE_FILES
        }

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


def _read_first_files(uri: str, folder: Path) -> dict[str, File]:
    """Read the regular files of an image's working folder; links are left out.

    Raises:
        UserError: there are more than a workspace may have.
    """
    try:
        return folders.read_tree(folder, FIRST_FILES).tree
    except TooLargeError as cause:
        problem = _invalid_workspace(uri, f"begins with its image's working folder: {cause}")
        raise UserError(problem) from cause


def _invalid_workspace(uri: str, what: str) -> Problem:
    fix = "point the workspace at a folder of plain files"
    return Problem(reason="InvalidWorkspace", what=what, where=uri, fix=fix)


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
