"""Grantor: signs reads of a pool's store for its hosts, of what the spec or an order names."""

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from etude.common.api.pool.spec import EnvPoolSpec
from etude.common.blobs import ObjectInfo, ObstoreStore, open_bucket
from etude.common.errors import ForbiddenError, InvalidFieldError, WrongStateError
from etude.envserver import metrics
from etude.envserver.read_grants.allowed_prefixes import (
    OrderedWorkspaces,
    is_below,
    plain_prefix,
    spec_prefixes,
)
from etude.v1 import environments_pb2

LIFETIME_S = 300
"""Life of a URL: a host asks again for what takes longer."""
MAX_KEYS = 256
PAGE = 1_000
"""With session credentials a URL has 1.5 kB: a page is within a message's limit."""

_open = functools.lru_cache(maxsize=64)(open_bucket)


@dataclass(slots=True)
class ReadGrantor:
    """Grants reads with this process's credentials. Its calls are safe on several threads."""

    spec: Callable[[], EnvPoolSpec]
    """The pool's newest."""
    workspaces: OrderedWorkspaces = field(default_factory=OrderedWorkspaces)
    lifetime_s: int = LIFETIME_S

    def grant(
        self, request: environments_pb2.GrantReadsRequest
    ) -> environments_pb2.GrantReadsResponse:
        """Sign a read for each object of a request that exists; call it on a thread.

        Raises:
            WrongStateError: this pool's store has no credentials that hosts would need.
            ForbiddenError: neither the pool's spec nor an order names the objects.
            InvalidFieldError: there are too many keys, or a key is none.
            UserError: the URI names no bucket.
            StoreError: the store is unavailable, or refuses.
        """
        with metrics.read_grant_refusals.count_exceptions((ForbiddenError, InvalidFieldError)):
            prefix = self._allowed_prefix(request)
        access = self.spec().store
        if access is None or access.secret_ref is None:
            raise WrongStateError("the pool's store has no Secret: its hosts read it without")
        store = _open(prefix, endpoint=access.endpoint, region=access.region)
        found, has_more = _find(store, request)
        urls = store.sign_reads([info.key for info in found], lifetime_s=self.lifetime_s)
        metrics.read_grants.inc(len(found))
        return environments_pb2.GrantReadsResponse(
            grants=map(_grant, found, urls), lifetime_seconds=self.lifetime_s, has_more=has_more
        )

    def _allowed_prefix(self, request: environments_pb2.GrantReadsRequest) -> str:
        if len(request.keys) > MAX_KEYS:
            raise InvalidFieldError("keys", f"has {len(request.keys)}, more than {MAX_KEYS}")
        prefix = plain_prefix(request.uri)
        if not prefix:
            raise InvalidFieldError("uri", f"{request.uri[:256]!r} is not s3://BUCKET/PREFIX")
        if self.workspaces.has(request.uri, now_s=time.monotonic()):
            return prefix
        allowed = list(spec_prefixes(self.spec()))
        wanted = [f"{prefix}/{key}" for key in request.keys] or [prefix]
        for each in wanted:
            if not any(is_below(each, one) for one in allowed):
                raise ForbiddenError(
                    f"{each[:512]} is below no prefix of the pool's spec, and no workspace that"
                    " this broker ordered"
                )
        return prefix


def _find(
    store: ObstoreStore, request: environments_pb2.GrantReadsRequest
) -> tuple[Sequence[ObjectInfo], bool]:
    """The objects of a request that exist, and true if another page follows."""
    if request.keys:
        heads = [store.head(key) for key in request.keys]
        return [info for info in heads if info is not None], False
    listed = list(itertools.islice(store.list("", request.after), PAGE + 1))
    return listed[:PAGE], len(listed) > PAGE


def _grant(info: ObjectInfo, url: str) -> environments_pb2.ReadGrant:
    return environments_pb2.ReadGrant(
        key=info.key,
        size=info.size,
        tag=info.tag,
        modified_unix_s=int(info.modified_s),
        url=url,
    )
