"""Tool grep: searches file contents."""

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator
from typing_extensions import override

from etude.agent.patterns import FileMatches, GrepQuery
from etude.agent.tools.base import Access, Tool, ToolOutcome
from etude.agent.tools.files import CAP_BYTES
from etude.agent.tools.truncation import truncate
from etude.agent.workspace import Workspace

MAX_MATCHES = 200
TYPES = {
    "c": "*.{c,h}",
    "cpp": "*.{cc,cpp,cxx,hh,hpp,hxx,h}",
    "css": "*.{css,scss}",
    "go": "*.go",
    "html": "*.{htm,html}",
    "java": "*.java",
    "js": "*.{js,jsx,mjs,cjs}",
    "json": "*.json",
    "md": "*.{md,markdown}",
    "py": "*.{py,pyi}",
    "ruby": "*.rb",
    "rust": "*.rs",
    "sh": "*.{sh,bash}",
    "sql": "*.sql",
    "toml": "*.toml",
    "ts": "*.{ts,tsx,mts,cts}",
    "yaml": "*.{yaml,yml}",
}
"""Globs of the languages that `type` knows."""
_Lines = Annotated[int, Field(ge=0, le=100)]


class Grep(Tool):
    """Search file contents with a regular expression (RE2: no look-around, no back-references)."""

    access: ClassVar[Access] = Access.TREE
    pattern: str = Field(min_length=1)
    """What to look for."""
    path: str = "."
    """A file, or the folder to search."""
    output_mode: Literal["content", "files_with_matches", "count"] = "content"
    """Matching lines, paths only, or matching lines per file."""
    type: str = ""
    """Only files of one language, like py or ts."""
    glob: str = ""
    """Only files whose name or path matches, like *.py or src/**."""
    multiline: bool = False
    """Let a match cross lines."""
    ignore_case: bool = Field(default=False, alias="-i")
    """Ignore upper and lower case."""
    after: _Lines = Field(default=0, alias="-A")
    """Lines to show after a match."""
    before: _Lines = Field(default=0, alias="-B")
    """Lines to show before a match."""
    around: _Lines = Field(default=0, alias="-C")
    """Lines to show around a match."""

    @field_validator("type")
    @classmethod
    def _check_type(cls, value: str) -> str:
        if value and value not in TYPES:
            raise ValueError(f"unknown type {value!r}; known are {' '.join(TYPES)}")
        return value

    @override
    async def run(self, workspace: Workspace) -> ToolOutcome:
        found = await workspace.grep(self._query())
        if not found:
            return ToolOutcome(content="No matches.")
        rows = list(self._rows(found))
        cut = truncate("\n".join(rows), cap_bytes=CAP_BYTES, rest="narrow pattern, path or glob")
        return ToolOutcome(content=cut.text, omitted_bytes=cut.omitted_bytes)

    def _query(self) -> GrepQuery:
        return GrepQuery(
            pattern=self.pattern,
            path=self.path,
            globs=tuple(g for g in (self.glob, TYPES.get(self.type, "")) if g),
            ignore_case=self.ignore_case,
            multiline=self.multiline,
            before=max(self.before, self.around),
            after=max(self.after, self.around),
            limit=MAX_MATCHES if self.output_mode == "content" else 0,
        )

    def _rows(self, found: Sequence[FileMatches]) -> Iterator[str]:
        left, what = len(found) - MAX_MATCHES, "files"
        match self.output_mode:
            case "files_with_matches":
                yield from (file.path for file in found[:MAX_MATCHES])
            case "count":
                yield from (f"{file.path}:{file.num_matches}" for file in found[:MAX_MATCHES])
            case "content":
                has_context = bool(self.before or self.after or self.around)
                yield from _content(found, has_context=has_context)
                left, what = sum(file.num_matches for file in found) - MAX_MATCHES, "matching lines"
        if left > 0:
            yield f"[... {left} {what} omitted; narrow pattern, path or glob ...]"


def _content(found: Sequence[FileMatches], *, has_context: bool) -> Iterator[str]:
    """Rows like ripgrep's: PATH:LINE:TEXT, PATH-LINE-TEXT around it, -- between pieces."""
    last: tuple[str, int] | None = None
    for file in found:
        for line in file.lines:
            if has_context and last is not None and last != (file.path, line.number - 1):
                yield "--"
            sign = ":" if line.is_match else "-"
            yield f"{file.path}{sign}{line.number}{sign}{line.text}"
            last = (file.path, line.number)
