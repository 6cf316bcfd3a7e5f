"""Tool codebase_search: finds code by a question."""

from typing import ClassVar

from pydantic import Field
from typing_extensions import override

from etude.agent.search.chunks import Chunk
from etude.agent.search.codebase import SearchedFiles
from etude.agent.search.tokens import split_words
from etude.agent.tools.base import Access, Texts, Tool, ToolError, ToolOutcome
from etude.agent.tools.truncation import TruncatedText, truncate
from etude.agent.workspace import Workspace, WorkspaceError

MAX_RESULTS = 10
CAP_BYTES = 3 << 10
"""Limit of one result; 80 lines of 36 characters fit."""


class CodebaseSearch(Tool):
    """Find code by what it does: the pieces that answer a question best, as NUMBER|TEXT lines."""

    access: ClassVar[Access] = Access.TREE
    query: str = Field(min_length=1, max_length=4_000)
    """A complete question, like: Where are expired sessions removed?"""
    target_directories: Texts = ()
    """Folders to look in; the whole workspace if there are none."""

    @override
    async def run(self, workspace: Workspace) -> ToolOutcome:
        if not split_words(self.query):
            raise ToolError("the query has no word of two or more Latin letters")
        folders = [(await workspace.stat(path)).path for path in self.target_directories]

        async def read(path: str) -> bytes | None:
            return await _read(workspace, path)

        files = SearchedFiles(await workspace.hashes(), read)
        found = await workspace.codebase.search(files, self.query, folders, MAX_RESULTS)
        shown = [await _show_chunk(workspace, chunk) for chunk in found.chunks]
        parts = [cut.text for cut in shown if cut is not None]
        notes = [f"[{found.num_skipped} changed files not searched]"] if found.num_skipped else []
        return ToolOutcome(
            content="\n\n".join([*(parts or ["No code found."]), *notes, f"[{found.backend}]"]),
            omitted_bytes=sum(cut.omitted_bytes for cut in shown if cut is not None),
        )


async def _read(workspace: Workspace, path: str) -> bytes | None:
    try:
        return await workspace.read(path)
    except WorkspaceError:
        return None  # gone, exchanged or closed since it was listed: as if it were not there


async def _show_chunk(workspace: Workspace, chunk: Chunk) -> TruncatedText | None:
    """The chunk's lines as they are now."""
    data = await _read(workspace, chunk.path)
    if data is None:
        return None
    lines = data.decode("utf-8", "replace").split("\n")[chunk.start - 1 : chunk.end]
    rows = [f"{n}|{line.removesuffix(chr(13))}" for n, line in enumerate(lines, chunk.start)]
    rest = f"read {chunk.path} from line {chunk.start}"
    cut = truncate("\n".join(rows), cap_bytes=CAP_BYTES, rest=rest)
    return TruncatedText(f"{chunk.path}:{chunk.start}-{chunk.end}\n{cut.text}", cut.omitted_bytes)
