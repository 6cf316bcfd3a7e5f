"""Sources of workspaces: folders by URI, read once and cached; the embedder of their searches."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3
from google.protobuf.message import DecodeError

from etude.agent.search.codebase import Codebase
from etude.agent.search.contents import HASHED_ID
from etude.agent.search.remote import RemoteCodebase
from etude.agent.search.shared_index import SharedIndex
from etude.common.api.pool.spec import SearchSettings
from etude.common.errors import CorruptError, Problem, UserError
from etude.common.harbor.task import read_files
from etude.common.stores import NothingThereError
from etude.envserver.host.task_images import TaskTemplate
from etude.envserver.storage import base_files, folders, trees
from etude.envserver.storage.folders import FolderLimits, TooLargeError
from etude.envserver.storage.store_reads import DirectReads, StoreReads
from etude.envserver.storage.trees import File, Tree

if TYPE_CHECKING:
    from etude.agent.search.embedders.interface import Embedder

CACHE_BYTES = 256 << 20
MAX_SOURCE_BYTES = 64 << 20
FIRST_FILES = FolderLimits(max_files=folders.DIFF.max_files, max_bytes=MAX_SOURCE_BYTES)
"""Limits on the files of an image that are searched."""
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
    """Files that are written into a new workspace."""
    first: Tree
    """Files that it begins with, as far as they are at hand: also those of the template's image."""
    base: bytes | None = None
    """List of all of them, where most are in the template's image."""
    key: str
    """Identity of these files."""
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
    reads: StoreReads = field(default_factory=DirectReads)
    """Of folders and prefixes."""
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
            read = asyncio.to_thread(self._read, uri, task)
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

    def _read(self, uri: str, task: TaskTemplate | None) -> WorkspaceSource:
        """Read a task's files, and the list of those in its image.

        Raises:
            UserError: they are more than a task may add.
            CorruptError: the list is damaged.
        """
        tree = {} if uri == EMPTY else self._read_folder(uri, may_lack=task is not None)
        num_bytes = sum(len(file.content) for file in tree.values())
        if num_bytes > MAX_SOURCE_BYTES:
            what = f"holds {num_bytes} bytes, more than {MAX_SOURCE_BYTES}"
            raise UserError(_invalid_workspace(uri, what))
        if task is None or task.base is None:
            return self._source(uri, tree, tree)
        first = {} if task.first_files is None else _read_first_files(uri, task.first_files)
        return self._source(uri, tree, first | tree, _read_base(task.base, tree))

    def _read_folder(self, uri: str, *, may_lack: bool) -> dict[str, File]:
        """Read the task's own files; a task whose files are in its image may lack the folder.

        Raises:
            NothingThereError: there is no such folder.
            UserError: it is a file, or holds what no workspace may hold.
        """
        try:
            with self.reads.visit_folder(uri, self.scratch) as folder:
                if not folder.is_dir():
                    raise UserError(_invalid_workspace(uri, "is not a folder"))
                return {
                    path: File(content, bool((folder / path).stat().st_mode & 0o100))
                    for path, content in read_files(folder).items()
                    if path not in IMAGE_FILES
                }
        except NothingThereError:
            if may_lack:  # an object store holds no empty folder
                return {}
            raise

    def _source(
        self, uri: str, tree: Tree, searched: Tree, base: bytes | None = None
    ) -> WorkspaceSource:
        contents = {path: file.content for path, file in searched.items()}
        return WorkspaceSource(
            uri=uri,
            tree=tree,
            first=searched,
            base=base,
            key=trees.tree_identity(tree) if base is None else blake3(base).hexdigest(),
            num_bytes=sum(map(len, contents.values())) + len(base or b""),
            index=SharedIndex(contents, self.embedder),
            search_service=self.search_service,
        )


def _read_base(path: Path, tree: Tree) -> bytes:
    """The list of an image's files, and of those that a task adds.

    Raises:
        CorruptError: it is damaged.
    """
    try:
        listed = base_files.decode_base(path.read_bytes())
    except (OSError, DecodeError) as cause:
        raise CorruptError(f"{path}: {cause}; remove the folder to pull it again") from cause
    return base_files.encode_base(listed | base_files.list_tree(tree))


def _read_first_files(uri: str, folder: Path) -> dict[str, File]:
    """Read the copies of an image's files.

    Raises:
        UserError: there are more than are searched.
    """
    try:
        return folders.read_tree(folder, FIRST_FILES).tree
    except TooLargeError as cause:
        raise UserError(_invalid_workspace(uri, f"begins with its image's: {cause}")) from cause


def _invalid_workspace(uri: str, what: str) -> Problem:
    fix = "point the workspace at a folder of plain files"
    return Problem(reason="InvalidWorkspace", what=what, where=uri, fix=fix)


if TYPE_CHECKING:
    from etude.agent.search.embedders.interface import Embedder


def load_embedder(search: SearchSettings, scratch: Path, reads: StoreReads) -> "Embedder | None":
    """Load the embedder that the pool names; None for the built-in one.

    Raises:
        UserError: this host does not have it.
        CorruptError: its file is damaged.
    """
    models = reads.local_folder(search.models, scratch) if search.models else scratch
    if search.backend == HASHED_ID:
        return None
    from etude.agent.search.embedders.registry import load_embedder  # noqa: PLC0415 - loads numpy

    return load_embedder(search.backend, models)
