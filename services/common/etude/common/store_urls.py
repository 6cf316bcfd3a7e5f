"""Object store URLs: the folder or bucket of a URL, the endpoint and the region of an S3."""

import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from etude.common.errors import Problem, UserError

_NAME = r"[A-Za-z0-9]([-A-Za-z0-9._]*[A-Za-z0-9])?\.?"
_HEX = r"[0-9A-Fa-f]{1,4}"
_IPV6 = rf"({_HEX}:){{7}}{_HEX}|({_HEX}(:{_HEX}){{0,3}})?::({_HEX}(:{_HEX}){{0,2}})?"
_PORT = r"([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
ENDPOINT = rf"^https?://({_NAME}|\[({_IPV6})\])(:{_PORT})?/?$"
"""Scheme, host and perhaps a port: the S3 clients take no path, and break off at other text."""
BASE_URL = rf"^https?://({_NAME}|\[({_IPV6})\])(:{_PORT})?(/[^\s?#]*)?$"
"""Scheme, host, perhaps a port and a path."""
REGION = r"^[A-Za-z0-9][-A-Za-z0-9]*$"
BUCKET = r"^[A-Za-z0-9][-A-Za-z0-9._]{2,254}$"
"""Wider than the names that may be given today: old buckets keep theirs."""


class BucketUrl(NamedTuple):
    """The bucket and prefix that an s3:// URL names."""

    name: str
    prefix: str
    """Without slashes at its ends; empty for the whole bucket."""


def endpoint_of(text: str | None, *, where: str = "endpoint") -> str | None:
    """An S3 endpoint without a slash at its end; None stands for the one of AWS.

    Raises:
        UserError: it is none.
    """
    if text is None or re.fullmatch(ENDPOINT, text):
        return None if text is None else text.rstrip("/")
    fix = "give scheme, host and port alone, such as http://127.0.0.1:9000"
    raise UserError(Problem("InvalidStorage", f"{text!r} is no endpoint", where, fix))


def region_of(text: str | None) -> str | None:
    """An S3 region.

    Raises:
        UserError: it is none.
    """
    if text is None or re.fullmatch(REGION, text):
        return text
    fix = "give letters, digits and hyphens, such as eu-central-1"
    raise UserError(Problem("InvalidStorage", f"{text!r} is no region", "region", fix))


def folder_of(url: str) -> Path | None:
    """The folder of a file:///folder URL; None for any other.

    Raises:
        UserError: no folder can have this name.
    """
    parts = _split(url)
    if parts.scheme != "file" or parts.netloc or not parts.path.startswith("/"):
        return None
    path = unquote(parts.path)
    if "\0" in path:
        fix = "leave %00 out: no folder has a NUL in its name"
        raise UserError(Problem("InvalidStorage", "names no folder", url, fix))
    return Path(path)


def bucket_of(url: str) -> BucketUrl | None:
    """The bucket of an s3://bucket/prefix URL; None for any other.

    Raises:
        UserError: no bucket can have this name.
    """
    parts = _split(url)
    if parts.scheme != "s3" or not parts.netloc:
        return None
    if not re.fullmatch(BUCKET, parts.netloc):
        fix = "use s3://bucket/prefix; names are 3 to 63 of a-z, 0-9, dot and hyphen"
        raise UserError(Problem("InvalidStorage", "names no bucket", url, fix))
    prefix = parts.path.strip("/")
    if prefix and (not prefix.isprintable() or {"", ".", ".."} & set(prefix.split("/"))):
        fix = "use s3://bucket/prefix; a prefix has no control characters, and none of //, . and .."
        raise UserError(Problem("InvalidStorage", "names no prefix", url, fix))
    return BucketUrl(parts.netloc, prefix)


def invalid_store_problem(url: str, *, where: str = "storage.uri") -> Problem:
    """Problem with a URL that is neither folder nor bucket."""
    fix = "use file:///absolute/folder or s3://bucket/prefix"
    if url and "://" not in url:
        fix = f"use {Path(url).absolute().as_uri()} for a folder, s3://bucket/prefix for a bucket"
    return Problem("InvalidStorage", f"{url!r} names no object store", where, fix)


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as cause:  # brackets where an address would be
        raise UserError(invalid_store_problem(url)) from cause
