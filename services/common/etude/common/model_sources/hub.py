"""A hub of models over HTTP, through huggingface_hub."""

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import httpx2
from huggingface_hub import HfApi, get_session, hf_hub_url, hf_raise_for_status
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError
from huggingface_hub.hf_api import ModelInfo, RepoSibling
from typing_extensions import override

from etude.common.backoff import Backoff
from etude.common.errors import Problem, UnavailableError, UserError
from etude.common.hub_uri import COMMIT, HubUri
from etude.common.model_sources.files import ModelFile, RemoteModel, select_files
from etude.common.model_sources.hub_access import HubAccess

log = logging.getLogger(__name__)
# The client logs each request's URL, and those of content hosts carry a signature.
logging.getLogger("httpx2").setLevel(logging.WARNING)

T = TypeVar("T")

_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHUNK_BYTES = 1 << 20


class HubError(UnavailableError):
    """The hub gave no answer, or broke off; a later call may succeed."""

    reason = "HubUnavailable"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel(RemoteModel):
    """A repository at one commit."""

    uri: str
    name: str
    files: tuple[ModelFile, ...]
    commit: str
    repository: str
    access: HubAccess

    @override
    def read(self, file: ModelFile, start: int, length: int) -> bytes:
        if not length:
            return b""
        access = self.access
        url = hf_hub_url(self.repository, file.name, revision=self.commit, endpoint=access.endpoint)
        where = f"{self.uri}: {file.name}"
        return _repeat(lambda: _read_range(url, start, length, access), access, where)


def open_hub_model(uri: HubUri, access: HubAccess) -> HubModel:
    """The files of a repository at the commit that the revision names now.

    Raises:
        UserError: the hub refuses, knows no such revision, or the model is refused.
        HubError: the hub gave no answer.
    """
    api = HfApi(endpoint=access.endpoint, token=access.token or False)
    where = uri.text()

    def ask() -> ModelInfo:
        return api.model_info(
            uri.repository,
            revision=uri.revision,
            files_metadata=True,
            timeout=access.patience.request_s,
        )

    info = _repeat(ask, access, where)
    commit = str(info.sha)
    if not COMMIT.fullmatch(commit):
        raise HubError(f"{where}: {access.host} names no commit")
    siblings = {str(sibling.rfilename): sibling for sibling in info.siblings or ()}
    used = select_files(siblings, where=where)
    return HubModel(
        uri=HubUri(uri.repository, commit).text(),
        name=uri.name,
        files=tuple(_model_file(siblings[name], where) for name in used),
        commit=commit,
        repository=uri.repository,
        access=access,
    )


def _model_file(sibling: RepoSibling, where: str) -> ModelFile:
    """A file with its digest.

    Raises:
        HubError: the hub gives no usable size or digest.
    """
    size = sibling.size
    if sibling.lfs is not None and _SHA256.fullmatch(str(sibling.lfs.sha256)):
        digest, size = f"sha256:{sibling.lfs.sha256}", sibling.lfs.size
    elif COMMIT.fullmatch(str(sibling.blob_id)):
        digest = f"git:{sibling.blob_id}"
    else:
        raise HubError(f"{where}: {sibling.rfilename}: the hub gives no digest")
    if type(size) is not int or not 0 <= size < 1 << 48:
        raise HubError(f"{where}: {sibling.rfilename}: the hub gives no size")
    return ModelFile(sibling.rfilename, size, digest)


def _read_range(url: str, start: int, length: int, access: HubAccess) -> bytes:
    """One attempt at a range of a file, over any redirect; the token stays with the endpoint.

    Raises:
        HubError: another range came, or it ended early.
    """
    headers = {
        **({"Authorization": f"Bearer {access.token}"} if access.token else {}),
        "Range": f"bytes={start}-{start + length - 1}",
        "Accept-Encoding": "identity",
    }
    limit_s = access.patience.request_s
    with get_session().stream("GET", url, headers=headers, timeout=limit_s) as response:
        hf_raise_for_status(response)
        if response.status_code != 206 and start:
            raise HubError(f"{access.host} serves no ranges, which large files need")
        data = b"".join(_limited(response.iter_bytes(_CHUNK_BYTES), length))
    if len(data) != length:
        raise HubError(f"{access.host} sent {len(data)} of {length} bytes")
    return data


def _limited(chunks: Iterator[bytes], length: int) -> Iterator[bytes]:
    """The first bytes of a body of unknown length."""
    for chunk in chunks:
        yield chunk[:length]
        length -= len(chunk)
        if length <= 0:
            return


def _repeat(call: Callable[[], T], access: HubAccess, where: str) -> T:
    """The answer to a request, repeated after errors that may pass.

    Raises:
        UserError: the hub refuses.
        HubError: no attempt succeeded.
    """
    patience = access.patience
    backoff = Backoff(patience.first_pause_s, patience.longest_pause_s)
    attempt = 0
    while True:
        attempt += 1
        pause_s = backoff.next_s()
        try:
            return call()
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status not in {408, 425, 429} and status < 500:
                raise UserError(
                    _refusal(error, access, where)
                ) from None  # its text has a signed address
            cause = f"answered {status}"
            pause_s = max(pause_s, _asked_pause_s(error.response.headers))
        except (httpx2.TransportError, httpx2.InvalidURL) as error:
            cause = f"gave no answer ({type(error).__name__})"
        except HubError as error:
            cause = str(error).removeprefix(f"{access.host} ")
        if attempt >= patience.attempts:
            raise HubError(f"{where}: {access.host} {cause}, {attempt} times in a row")
        pause_s = min(pause_s, patience.longest_pause_s)
        log.info("%s: %s %s; asked again in %.1f s", where, access.host, cause, pause_s)
        time.sleep(pause_s)


def _asked_pause_s(headers: Mapping[str, str]) -> float:
    """Seconds of a Retry-After header; 0 without one, or with a date."""
    text = headers.get("retry-after", "")
    return float(text) if re.fullmatch(r"[0-9]{1,6}", text) else 0.0


def _refusal(error: HfHubHTTPError, access: HubAccess, where: str) -> Problem:
    status, code = error.response.status_code, error.response.headers.get("x-error-code", "")
    token = "the token of HF_TOKEN" if access.token else "no token: HF_TOKEN is not set"
    if isinstance(error, GatedRepoError):
        what = f"is gated, and {access.host} refuses {token}"
        fix = "accept the model's terms on its page, and set HF_TOKEN to a token of that account"
        return Problem("Forbidden", what, where, fix)
    if status in {401, 403}:
        what = f"is private or does not exist: {access.host} answered {status} to {token}"
        fix = "check the name, and set HF_TOKEN to a token that may read it"
        return Problem("Forbidden", what, where, fix)
    what = f"is not on {access.host}: it answered {status} {code}".rstrip()
    fix = "check organisation, name and revision, and HF_ENDPOINT"
    return Problem("NotFound", what, where, fix)
