"""Factory of stores: a folder or a bucket from its URL."""

import os
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from obstore.store import LocalStore, S3Store

from etude.common.blobs.error_translation import translate_errors
from etude.common.blobs.obstore_client import ObstoreStore
from etude.common.blobs.store import Store
from etude.common.errors import Problem, UserError
from etude.common.store_urls import (
    bucket_of,
    endpoint_of,
    folder_of,
    invalid_store_problem,
    region_of,
)

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

DEFAULT_REGION = "us-east-1"
CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
ONE_REQUEST_BYTES = 64 << 20


class Deadlines(NamedTuple):
    """Time limits and retries of calls to a bucket; a folder's calls end when the kernel's do."""

    connect_s: float = 5.0
    request_s: float = 120.0
    """One request with its body: the largest is ONE_REQUEST_BYTES, so this asks for 0.6 MB/s."""
    range_s: float = 30.0
    """One attempt at a range: at most 16 MiB, and a slow one is better asked again."""
    retries: int = 5
    """Of one call, after a 5xx answer, a connection that broke or, for reads, a time limit."""
    retry_s: float = 60.0
    """No retry begins later than this after the first attempt."""


def open_store(
    url: str,
    *,
    endpoint: str | None = None,
    region: str | None = None,
    deadlines: Deadlines = Deadlines(),  # noqa: B008 - frozen
) -> Store:
    """The store behind file:///folder or s3://bucket/prefix.

    S3 credentials come from the standard AWS_… environment variables.

    Raises:
        UserError: the URL names no store, or endpoint, region or credentials are none.
        StoreError: the client refuses what the environment says.
    """
    folder = folder_of(url)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        local = LocalStore(folder, mkdir=True)
        return ObstoreStore(url.rstrip("/"), local, local)
    return open_bucket(url, endpoint=endpoint, region=region, deadlines=deadlines)


def open_bucket(
    url: str,
    *,
    endpoint: str | None = None,
    region: str | None = None,
    deadlines: Deadlines = Deadlines(),  # noqa: B008 - frozen
) -> ObstoreStore:
    """The store behind s3://bucket/prefix; also signs URLs that others read by.

    Raises:
        UserError: the URL names no bucket, or endpoint, region or credentials are none.
        StoreError: the client refuses what the environment says.
    """
    bucket = bucket_of(url)
    if bucket is None:
        raise UserError(invalid_store_problem(url))
    check_environment()
    endpoint, region = endpoint_of(endpoint), region_of(region)

    def client(*, limit_s: float, retries: int) -> S3Store:
        return S3Store(
            bucket.name,
            prefix=bucket.prefix or None,
            config={"endpoint": endpoint} if endpoint else {},  # as a keyword, None is refused
            region=region or DEFAULT_REGION,
            client_options=_limits(endpoint, deadlines, limit_s),
            retry_config=_retries(deadlines, retries),
            virtual_hosted_style_request=False,
        )

    with translate_errors(url):
        patient = client(limit_s=deadlines.request_s, retries=deadlines.retries)
        once = client(limit_s=deadlines.range_s, retries=0)
    return ObstoreStore(url.rstrip("/"), patient, once, parts_above=ONE_REQUEST_BYTES)


def check_environment() -> None:
    """Clients read these by themselves, and break off at what no request can say.

    Raises:
        UserError: naming the variable.
    """
    for name in ENDPOINT_VARIABLES:
        endpoint_of(os.environ.get(name) or None, where=name)
    for name in CREDENTIALS:
        if not os.environ.get(name, "").isprintable():
            fix = "take the line break or other control character out, also out of its Secret"
            raise UserError(Problem("InvalidStorage", "is no credential", name, fix))


def _limits(endpoint: str | None, deadlines: Deadlines, limit_s: float) -> "ClientConfig":
    return {
        "allow_http": (endpoint or "").startswith("http://"),
        "connect_timeout": timedelta(seconds=deadlines.connect_s),
        "timeout": timedelta(seconds=limit_s),
    }


def _retries(deadlines: Deadlines, retries: int) -> "RetryConfig":
    # Pauses double with jitter: 0.1 s, then up to 5 s.
    return {
        "max_retries": retries,
        "retry_timeout": timedelta(seconds=deadlines.retry_s),
        "backoff": {
            "init_backoff": timedelta(seconds=0.1),
            "max_backoff": timedelta(seconds=5),
            "base": 2,
        },
    }
