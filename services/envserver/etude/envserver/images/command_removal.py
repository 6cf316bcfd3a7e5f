"""The verbs rm and prune of `etude images`."""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from etude.common.blobs import Store, open_store
from etude.common.errors import Problem, UserError
from etude.common.store_urls import bucket_of
from etude.envserver.images import image_references, removal
from etude.envserver.images.build_cache import BuildCache
from etude.envserver.images.removal import StoredImage

VERBS = ("rm", "prune")
DAY_S = 86_400.0
OLD_DAYS = 7
_UNKNOWN_USE = Problem(
    "Usage",
    what="is needed for a store: only the manifests tell which images its pools boot",
    where="--pools",
    fix="kubectl get envp,rlr -A -o yaml > pools.yaml, and give --pools pools.yaml",
)


class Verbs(Protocol):
    """The object to which argparse adds verbs."""

    def add_parser(self, name: str) -> argparse.ArgumentParser: ...


def add_verbs(verbs: Verbs) -> list[argparse.ArgumentParser]:
    """Describe both verbs."""
    rm, prune = (verbs.add_parser(name) for name in VERBS)
    rm.add_argument("image", help="name or address, or s3://bucket/prefix/address")
    prune.add_argument("url", nargs="?", help="s3://bucket/prefix; the images here unless given")
    prune.add_argument("--older-than", type=float, default=OLD_DAYS, metavar="DAYS")
    for verb in (rm, prune):
        verb.add_argument("--pools", type=Path, action="append", default=[], metavar="FILE")
        verb.add_argument("--dry-run", action="store_true")
        verb.add_argument("--endpoint", help="S3 endpoint, for stores other than AWS")
        verb.add_argument("--region", help="S3 region")
    return [rm, prune]


def run(given: argparse.Namespace, cache: BuildCache) -> int:
    """Remove images, and print the outcome of each.

    Raises:
        UserError: an image is in use, or there is none.
        StoreError: the store failed.
    """
    image, url = _parse_target(given)
    if url is not None and not given.pools:
        raise UserError(_UNKNOWN_USE)
    named = image_references.named_images(given.pools)
    store = None if url is None else open_store(url, endpoint=given.endpoint, region=given.region)
    kept = removal.list_cached(cache) if store is None else removal.list_stored(store)
    if image is None:
        before_s = time.time() - DAY_S * given.older_than
        going = removal.prunable(kept, named, before_s=before_s)
    else:
        going = removal.select_removable(kept, image, named, url=url)
    if given.dry_run:
        sys.stdout.write("".join(f"would remove {_row(each)}\n" for each in going))
        return 0
    is_held = False
    for each, is_gone in _remove(cache, store, going):
        is_held = is_held or not is_gone
        sys.stdout.write(f"{'removed' if is_gone else 'in use, kept'} {_row(each)}\n")
    if is_held and image is not None:
        what, fix = "is booted by a host on this machine", "end the run or pool that uses it first"
        raise UserError(Problem("Conflict", what, image, fix))
    return 0


class _RemovalTarget(NamedTuple):
    image: str | None
    """None: all that may be removed."""
    url: str | None
    """Folder of a store; None: the cache."""


def _parse_target(given: argparse.Namespace) -> _RemovalTarget:
    """Parse the images to remove.

    Raises:
        UserError: the URL is not a bucket's; a local folder may hold anything else.
    """
    if given.verb == "prune":
        return _RemovalTarget(None, None if given.url is None else _bucket(given.url, "URL"))
    prefix, _, image = given.image.rpartition("/")
    is_here = "://" not in given.image
    return (
        _RemovalTarget(given.image, None)
        if is_here
        else _RemovalTarget(image, _bucket(prefix, "IMAGE"))
    )


def _bucket(url: str, argument: str) -> str:
    fix = "use s3://bucket/prefix, or none for the images here"
    if argument == "IMAGE":
        fix = "use a name or an address of etude images ls, or s3://bucket/prefix/ADDRESS"
    try:
        bucket = bucket_of(url)
    except UserError as cause:
        what, fix = f"{url!r} {cause.problem.what}", cause.problem.fix
        raise UserError(Problem("Usage", what, argument, fix)) from cause
    if bucket is None:
        raise UserError(Problem("Usage", f"{url!r} is not a folder of a bucket", argument, fix))
    return url


def _remove(
    cache: BuildCache, store: Store | None, going: Sequence[StoredImage]
) -> Iterator[tuple[StoredImage, bool]]:
    if store is None:
        return removal.remove_cached(cache, going)
    return removal.remove_stored(store, going)


def _row(each: StoredImage) -> str:
    return f"{each.name or '-':24} {each.address}  {each.num_bytes / 2**20:6.0f} MiB"
