"""HTTP application of code search: indexes of bases, and answers to questions about them.

It keeps no state that a client cannot send again: a base that is unknown is answered with 404.
"""

import asyncio
import base64
import binascii
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from etude.agent.search.codebase import MAX_BYTES, MAX_CHANGED_BYTES, MAX_FILES
from etude.agent.search.contents import FileContent, content_digest
from etude.agent.search.overlay import Overlay
from etude.agent.search.remote import BASES_PATH, SEARCH_PATH, identify_base
from etude.agent.search.shared_index import SharedIndex
from etude.common.errors import UnavailableError
from etude.common.http_server import RequestLimits

if TYPE_CHECKING:
    from etude.agent.search.chunks import Chunk
    from etude.agent.search.embedders.interface import Embedder
    from etude.agent.search.index import BaseIndex

CACHE_BYTES = 512 << 20
"""Of the files of bases; their indexes take about as much again."""
_MAX_BASE_BODY_BYTES = 2 * MAX_BYTES
_MAX_QUESTION_BODY_BYTES = 32 << 20
_MAX_RESULTS = 100
_Path = Annotated[str, Field(min_length=1, max_length=1_024)]


class SearchQuery(BaseModel):
    """A question about the files of one workspace."""

    model_config = ConfigDict(extra="forbid", strict=True)

    base: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """Identity of the files that most of the workspace is."""
    removed: Annotated[list[_Path], Field(max_length=MAX_FILES)]
    """Files of the base that are gone."""
    changed: dict[_Path, str | None]
    """Files that differ from the base: content in base64; null is not searched."""
    question: Annotated[str, Field(min_length=1, max_length=4_000)]
    folders: Annotated[list[Annotated[str, Field(max_length=1_024)]], Field(max_length=1_000)]
    limit: Annotated[int, Field(ge=1, le=_MAX_RESULTS)]


class _Base(NamedTuple):
    shared: SharedIndex
    num_bytes: int


@dataclass(slots=True)
class SearchBases:
    """Indexes of bases, the least recently used out first."""

    embedder: "Embedder | None" = None
    cache_bytes: int = CACHE_BYTES
    _kept: OrderedDict[str, _Base] = field(default_factory=OrderedDict)

    def add(self, name: str, files: Mapping[str, bytes]) -> None:
        """Add the files of a base; its index is built at the first question."""
        self._kept[name] = _Base(SharedIndex(files, self.embedder), sum(map(len, files.values())))
        self._kept.move_to_end(name)
        while (
            len(self._kept) > 1 and sum(b.num_bytes for b in self._kept.values()) > self.cache_bytes
        ):
            self._kept.popitem(last=False)

    async def search(self, query: SearchQuery) -> "tuple[BaseIndex, list[Chunk]]":
        """The base's index, and the chunks that answer a question best.

        Raises:
            HTTPException: the base is unknown, or a content is none.
            UnavailableError: there is no parser on this machine.
        """
        found = self._kept.get(query.base)
        if found is None:
            raise HTTPException(404, "this base is unknown: send its files")
        self._kept.move_to_end(query.base)
        contents = unpack_contents(query.changed, MAX_CHANGED_BYTES + MAX_BYTES)
        index = await found.shared.get()
        return index, await asyncio.to_thread(_search, index, query, contents)


def _search(index: "BaseIndex", query: SearchQuery, contents: Mapping[str, bytes]) -> "list[Chunk]":
    digests = {path: index.digests[path] for path in index.digests.keys() - {*query.removed}}
    read = {path: FileContent(content_digest(data), data) for path, data in contents.items()}
    # Of a file that is not searched, the base's chunks are masked: it has no digest of the base.
    digests |= {path: read[path].digest if path in read else b"" for path in query.changed}
    overlay = Overlay(index)
    overlay.update(digests, read)
    return overlay.search(query.question, query.folders, query.limit)


def unpack_contents(packed: Mapping[str, object], max_bytes: int) -> dict[str, bytes]:
    """Contents of files in base64; those that are null are left out.

    Raises:
        HTTPException: one is not base64, or there is too much.
    """
    contents: dict[str, bytes] = {}
    left = max_bytes
    for path, data in packed.items():
        if data is None:
            continue
        try:
            contents[path] = base64.b64decode(str(data), validate=True)
        except (ValueError, binascii.Error):
            raise HTTPException(400, f"{path[:200]!r} is not base64") from None
        left -= len(contents[path])
        if left < 0:
            raise HTTPException(413, f"the files have more than {max_bytes} bytes")
    return contents


@dataclass(frozen=True, slots=True)
class SearchRoutes:
    """Routes of the service."""

    bases: SearchBases

    def build(self) -> ASGIApp:
        """Build the application."""
        routes = [
            Route(BASES_PATH + "{name}", self._store_base, methods=["PUT"]),
            Route(SEARCH_PATH, self._answer, methods=["POST"]),
        ]
        handlers: Mapping[Any, Callable[[Request, Any], Awaitable[Response]]] = {
            HTTPException: _answer_http_error,
            UnavailableError: _answer_unavailable,
        }
        return RequestLimits(Starlette(routes=routes, exception_handlers=handlers), _max_body_bytes)

    async def _store_base(self, request: Request) -> Response:
        files = await asyncio.to_thread(_read_base, await request.body())
        name = request.path_params["name"]
        if identify_base(files) != name:
            raise HTTPException(400, "the files are not those of this name")
        self.bases.add(name, files)
        return JSONResponse({})

    async def _answer(self, request: Request) -> Response:
        try:
            query = SearchQuery.model_validate_json(await request.body())
        except ValidationError as error:
            where = ".".join(map(str, error.errors()[0]["loc"]))[:200]
            raise HTTPException(400, f"{where}: {error.errors()[0]['msg']}") from None
        index, chunks = await self.bases.search(query)
        return JSONResponse({"backend": index.embedder.id, "chunks": chunks})


def _read_base(body: bytes) -> dict[str, bytes]:
    """Read the files of a base.

    Raises:
        HTTPException: they are none.
    """
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        raise HTTPException(400, "is not JSON") from None
    if not isinstance(values, dict) or len(values) > MAX_FILES or None in values.values():
        raise HTTPException(400, f"is not an object of at most {MAX_FILES} files")
    return unpack_contents(values, MAX_BYTES + MAX_CHANGED_BYTES)


def _max_body_bytes(path: str) -> int:
    return _MAX_BASE_BODY_BYTES if path.startswith(BASES_PATH) else _MAX_QUESTION_BODY_BYTES


async def _answer_http_error(_: Request, error: HTTPException) -> Response:
    return JSONResponse({"message": error.detail}, error.status_code)


async def _answer_unavailable(_: Request, error: UnavailableError) -> Response:
    return JSONResponse({"message": str(error)}, 503)
