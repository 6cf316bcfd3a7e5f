"""Prefixes of a store that hosts of a pool may read: those of its spec, and ordered workspaces."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from etude.common.api.pool.spec import EnvPoolSpec
from etude.common.store_urls import bucket_of

WORKSPACE_S = 3_600.0
"""A host reads a workspace as it carries out an order, and keeps a copy; retries take minutes."""
MAX_WORKSPACES = 65_536


def plain_prefix(uri: str) -> str:
    """A prefix of a bucket in its one spelling, which the store is opened by; empty for others.

    Raises:
        UserError: no bucket can have this name.
    """
    bucket = bucket_of(uri)
    return "" if bucket is None else f"s3://{bucket.name}/{bucket.prefix}".rstrip("/")


def is_below(prefix: str, allowed: str) -> bool:
    """True if a plain prefix is another one, or lies below it."""
    return prefix == allowed or prefix.startswith(f"{allowed}/")


def spec_prefixes(spec: EnvPoolSpec) -> Iterator[str]:
    """Plain prefixes that a pool's spec names: of images, and of models for searches."""
    named = [template.image for template in spec.templates]
    named += spec.images.sources if spec.images is not None else ()
    named.append(spec.search.models)
    for uri in named:
        if uri is not None and uri.startswith("s3://"):
            yield plain_prefix(uri)


@dataclass(slots=True)
class OrderedWorkspaces:
    """Workspaces that a broker has ordered from hosts lately."""

    _ordered_s: dict[str, float] = field(default_factory=dict)
    """When each was ordered last, the oldest first."""

    def record(self, uri: str, *, now_s: float) -> None:
        """Record an order."""
        if not uri.startswith("s3://"):
            return
        self._ordered_s.pop(uri, None)
        self._ordered_s[uri] = now_s
        while len(self._ordered_s) > MAX_WORKSPACES:
            del self._ordered_s[next(iter(self._ordered_s))]

    def has(self, uri: str, *, now_s: float) -> bool:
        """True if a workspace was ordered lately."""
        return now_s - self._ordered_s.get(uri, -WORKSPACE_S) < WORKSPACE_S
