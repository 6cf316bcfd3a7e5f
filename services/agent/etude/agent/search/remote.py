"""Code search by a service at an address: it indexes what clients send, and answers for many.

Product and training may reach one service, or two of the same image: the same files and the same
question have the same answer, as both run the same index on the same base.
"""

import asyncio
import base64
import hashlib
import http.client
import json
import ssl
import urllib.parse
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from typing_extensions import override

from etude.agent.patterns import is_hidden
from etude.agent.search.chunks import Chunk
from etude.agent.search.codebase import (
    Codebase,
    SearchedFiles,
    SearchResult,
    read_changed,
    read_contents,
)
from etude.agent.search.contents import content_digest
from etude.common.errors import UnavailableError

BASES_PATH = "/v1/bases/"
SEARCH_PATH = "/v1/search"
_REQUEST_S = 150.0
"""For one request: an index of the largest base takes about a minute."""
_MAX_ANSWER_BYTES = 1 << 20


class SearchServiceError(UnavailableError):
    """The service does not answer, or not as it must: the platform's fault, not the policy's."""

    reason = "SearchUnavailable"


class _Answer(NamedTuple):
    status: int
    body: bytes


@dataclass(slots=True)
class RemoteCodebase(Codebase):
    """Code search over one workspace, by a service."""

    address: str = field(kw_only=True)
    """Such as "https://search.example.com"."""
    backend: str = field(kw_only=True, default="")
    """Id of the embedder that the service must have; empty for any."""
    _base: Mapping[str, bytes] | None = None
    """Files that the service has an index of: the template's, or those of the first search."""
    _digests: Mapping[str, bytes] = field(default_factory=dict)
    """Of the base."""
    _base_id: str = ""

    @override
    async def search(
        self, files: SearchedFiles, question: str, folders: Collection[str], limit: int
    ) -> SearchResult:
        """The chunks that answer a question best.

        Raises:
            SearchServiceError: the service does not answer, or has another embedder.
        """
        async with self._lock:
            if self._base is None:
                await self._choose_base(files)
            changed = self._find_changed(self._digests, files.digests)
            fresh = await read_changed(files, changed, lambda *_: None)
            contents = {path: read.data for path, read in fresh.items() if read is not None}
            query = {
                "base": self._base_id,
                "removed": sorted(self._digests.keys() - files.digests.keys()),
                "changed": {path: pack_content(contents.get(path)) for path in changed},
                "question": question,
                "folders": [*folders],
                "limit": limit,
            }
            answer = await self._post("POST", SEARCH_PATH, query)
            if answer.status == http.HTTPStatus.NOT_FOUND:
                await self._put_base()
                answer = await self._post("POST", SEARCH_PATH, query)
            found = self._read_answer(answer, files, limit)
            return SearchResult(*found, len(changed) - len(contents))

    async def _choose_base(self, files: SearchedFiles) -> None:
        """Choose the template's files, or, if little of them is left, the present ones."""
        base = {path: data for path, data in self.shared.files.items() if not is_hidden(path)}
        digests = _digest_files(base)
        if not base or 2 * len(self._find_changed(digests, files.digests)) > len(files.digests):
            base = await read_contents(files)
            digests = _digest_files(base)
        self._base, self._digests, self._base_id = base, digests, identify_base(base)

    @staticmethod
    def _find_changed(base: Mapping[str, bytes], digests: Mapping[str, bytes]) -> list[str]:
        paths = (path for path, digest in digests.items() if base.get(path) != digest)
        return sorted(paths, key=str.encode)

    async def _put_base(self) -> None:
        """Send the base to a service that has no index of it.

        Raises:
            SearchServiceError: it does not take it.
        """
        packed = {path: pack_content(data) for path, data in (self._base or {}).items()}
        answer = await self._post("PUT", BASES_PATH + self._base_id, packed)
        if answer.status != http.HTTPStatus.OK:
            raise self._fault(f"answered {answer.status} to the files")

    def _read_answer(
        self, answer: _Answer, files: SearchedFiles, limit: int
    ) -> tuple[list[Chunk], str]:
        """Chunks and embedder of an answer.

        Raises:
            SearchServiceError: it is none.
        """
        if answer.status != http.HTTPStatus.OK:
            raise self._fault(f"answered {answer.status}")
        try:
            values = json.loads(answer.body)
            backend = values["backend"]
            chunks = [Chunk(path, start, end) for path, start, end in values["chunks"]]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise self._fault("sent no chunks") from None
        is_sound = len(chunks) <= limit and all(_is_sound(each, files) for each in chunks)
        if not is_sound or not isinstance(backend, str):
            raise self._fault("sent chunks of other files")
        if self.backend not in {"", backend}:
            raise self._fault(f"searches with {backend}, not {self.backend}")
        return chunks, backend

    async def _post(self, method: str, path: str, values: Mapping[str, Any]) -> _Answer:
        """Exchange one request for an answer.

        Raises:
            SearchServiceError: none comes.
        """
        body = await asyncio.to_thread(lambda: json.dumps(values).encode())
        try:
            return await asyncio.to_thread(_exchange, self.address, method, path, body)
        except (OSError, http.client.HTTPException) as error:
            raise self._fault(f"does not answer: {error}") from error

    def _fault(self, what: str) -> SearchServiceError:
        return SearchServiceError(f"code search at {self.address} {what}")


def _exchange(address: str, method: str, path: str, body: bytes) -> _Answer:
    parts = urllib.parse.urlsplit(address)
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(
            parts.hostname or "",
            parts.port,
            timeout=_REQUEST_S,
            context=ssl.create_default_context(),
        )
    else:
        connection = http.client.HTTPConnection(
            parts.hostname or "", parts.port, timeout=_REQUEST_S
        )
    try:
        headers = {"content-type": "application/json"}
        connection.request(method, parts.path.rstrip("/") + path, body, headers)
        response = connection.getresponse()
        return _Answer(response.status, response.read(_MAX_ANSWER_BYTES))
    finally:
        connection.close()


def identify_base(files: Mapping[str, bytes]) -> str:
    """Identity of a base: SHA-256, in hexadecimal digits, over its paths and contents."""
    hasher = hashlib.sha256()
    for path in sorted(files, key=str.encode):
        hasher.update(f"{path}\0".encode() + content_digest(files[path]))
    return hasher.hexdigest()


def pack_content(data: bytes | None) -> str | None:
    """Content of a file as JSON has it; None for a file that is not searched."""
    return None if data is None else base64.b64encode(data).decode()


def _digest_files(files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {path: content_digest(data) for path, data in files.items()}


def _is_sound(chunk: Chunk, files: SearchedFiles) -> bool:
    """True for lines of a file of the workspace."""
    if not isinstance(chunk.path, str) or chunk.path not in files.digests:
        return False
    return type(chunk.start) is type(chunk.end) is int and 1 <= chunk.start <= chunk.end
