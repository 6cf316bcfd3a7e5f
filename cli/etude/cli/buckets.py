"""Creation of a bucket by hand; runs only read and write objects."""

import contextlib
import os
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

import urllib3
from minio import Minio
from minio.commonconfig import ENABLED, Filter
from minio.error import MinioException, S3Error
from minio.lifecycleconfig import AbortIncompleteMultipartUpload, LifecycleConfig, Rule
from urllib3.exceptions import HTTPError, MaxRetryError

from etude.common.blobs.error_translation import NO_CREDENTIALS
from etude.common.blobs.factory import DEFAULT_REGION, check_environment
from etude.common.blobs.store import DeniedError
from etude.common.errors import EtudeError, Problem, StoreError, UserError
from etude.common.store_urls import bucket_of, endpoint_of, invalid_store_problem, region_of

AWS = "https://s3.amazonaws.com"
UPLOAD_DAYS = 1
"""An unfinished part of an upload is garbage after this; our uploads take minutes."""
PATIENCE = urllib3.Timeout(connect=5, read=30)
RETRIES = urllib3.Retry(3, backoff_factor=0.5, status_forcelist=(500, 502, 503, 504))
"""A server that has just started answers 503 for a moment."""
DENIED = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "RequestTimeTooSkewed"}


class UploadCleanup(StrEnum):
    """Cleanup of the parts of uploads that were never finished."""

    RULE = "a lifecycle rule of ours deletes unfinished uploads after a day"
    KEPT = "it has lifecycle rules already, which stay: one of them should abort unfinished uploads"
    SERVER = (
        "the server takes no rule for unfinished uploads: it must delete them itself, as MinIO does"
    )
    NOBODY = "no lifecycle rule was set"


class CreatedBucket(NamedTuple):
    """Result of `make_bucket`."""

    name: str
    is_new: bool
    cleaning: UploadCleanup


def make_bucket(
    url: str, *, endpoint: str | None = None, region: str | None = None, with_rule: bool = True
) -> CreatedBucket:
    """Make the bucket of an s3://bucket/prefix URL, unless it is there.

    Credentials come from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN.

    Raises:
        UserError: the URL names no bucket, or a name that S3 does not allow.
        DeniedError: there are no credentials, or they may not.
        StoreError: the endpoint does not answer, or answers with an error.
    """
    wanted = bucket_of(url)
    if wanted is None:
        raise UserError(invalid_store_problem(url, where="URL"))
    endpoint, region = endpoint_of(endpoint), region_of(region) or DEFAULT_REGION
    with _translated(url):
        client = _client(url, endpoint or AWS, region)
        is_new = not client.bucket_exists(wanted.name)
        if is_new:
            client.make_bucket(wanted.name, location=region)
        cleaning = _cleaning(client, wanted.name) if with_rule else UploadCleanup.NOBODY
    return CreatedBucket(wanted.name, is_new, cleaning)


def _client(url: str, endpoint: str, region: str) -> Minio:
    check_environment()
    access, secret = (
        os.environ.get(name) for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    )
    if not access or not secret:
        raise DeniedError(f"{url}: {NO_CREDENTIALS}")
    scheme, _, host = endpoint.partition("://")
    return Minio(
        host,
        access_key=access,
        secret_key=secret,
        session_token=os.environ.get("AWS_SESSION_TOKEN"),
        secure=scheme == "https",
        region=region,
        # The client's own waits five minutes and tries five times.
        http_client=urllib3.PoolManager(timeout=PATIENCE, retries=RETRIES),
    )


def _cleaning(client: Minio, bucket: str) -> UploadCleanup:
    rule = Rule(
        ENABLED,
        rule_filter=Filter(prefix=""),
        rule_id="etude-unfinished-uploads",
        abort_incomplete_multipart_upload=AbortIncompleteMultipartUpload(UPLOAD_DAYS),
    )
    try:
        found = client.get_bucket_lifecycle(bucket)
        if found is not None:  # a write replaces all rules, also those that this client cannot read
            ours = any(each.rule_id == rule.rule_id for each in found.rules)
            return UploadCleanup.RULE if ours else UploadCleanup.KEPT
        client.set_bucket_lifecycle(bucket, LifecycleConfig([rule]))
    except S3Error as error:
        if error.code in {"InvalidArgument", "MalformedXML", "NotImplemented", "InvalidRequest"}:
            return UploadCleanup.SERVER
        raise
    return UploadCleanup.RULE


@contextlib.contextmanager
def _translated(url: str) -> Iterator[None]:
    try:
        yield
    except EtudeError:
        raise
    except S3Error as error:
        what = f"{url}: {error.code}: {error.message}"
        raise (DeniedError(what) if error.code in DENIED else StoreError(what)) from error
    except ValueError as error:
        raise UserError(_bad_url(url, str(error))) from error
    except (HTTPError, MinioException) as error:
        cause = error.reason if isinstance(error, MaxRetryError) else error
        raise StoreError(f"{url}: {cause}") from error


def _bad_url(url: str, what: str) -> Problem:
    return Problem(
        "InvalidStorage",
        what=what,
        where=url,
        fix="use s3://bucket/prefix; names are 3 to 63 of a-z, 0-9, dot and hyphen",
    )
