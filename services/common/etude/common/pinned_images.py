"""References to images by digest, as tasks name them and nodes pull them."""

import re
from collections.abc import Collection
from typing import NamedTuple

from typing_extensions import override

from etude.common.errors import Problem, UserError

MAX_REFERENCE = 512
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_REPOSITORY = re.compile(
    r"[a-z0-9]([a-zA-Z0-9.-]*[a-zA-Z0-9])?(:[0-9]{1,5})?(/[a-z0-9]+([._-]+[a-z0-9]+)*)+"
)
"""A registry's host and a repository of it: distribution specification, "Pulling manifests"."""
_LAYOUT = re.compile(r"(file:///|s3://)[^\s@]+")
_FIX = "give HOST/REPOSITORY@sha256:…, or file:///FOLDER@sha256:… or s3://BUCKET/PREFIX@sha256:…"


class InvalidImageError(UserError):
    """A reference or an image that cannot be used."""

    def __init__(self, where: str, what: str, fix: str) -> None:
        super().__init__(Problem("InvalidImage", what, where, fix))


class PinnedImage(NamedTuple):
    """An image that can never come to mean something else."""

    source: str
    """Host and repository of a registry, or the URI of an OCI image layout."""
    digest: str
    """Of the manifest, or of the index that lists one for each platform: `sha256:…`."""

    @override
    def __str__(self) -> str:
        return f"{self.source}@{self.digest}"

    @property
    def is_layout(self) -> bool:
        """True if the image lies in an OCI image layout, not in a registry."""
        return "://" in self.source


def is_pinned(reference: str) -> bool:
    """True if a reference means to name a digest, and no template of a pool."""
    return "@" in reference


def pinned_digest(reference: str) -> str:
    """The digest that a reference means to name; empty for the name of a template's image."""
    return reference.rpartition("@")[2] if is_pinned(reference) else ""


def parse_pinned(reference: str) -> PinnedImage:
    """Parse a reference.

    Raises:
        InvalidImageError: it has no digest, or names neither a registry with its host nor a layout.
    """
    source, _, digest = reference.rpartition("@")
    where = reference[:MAX_REFERENCE]
    if len(reference) > MAX_REFERENCE or not _DIGEST.fullmatch(digest):
        raise InvalidImageError(where, "is not an image by its digest", _FIX)
    if _LAYOUT.fullmatch(source) is None and _REPOSITORY.fullmatch(source) is None:
        raise InvalidImageError(
            reference[:MAX_REFERENCE],
            "names no registry with its host, and no OCI image layout",
            _FIX,
        )
    if "://" not in source and not _is_host(source.partition("/")[0]):
        raise InvalidImageError(
            reference[:MAX_REFERENCE], "does not begin with the host of a registry", _FIX
        )
    return PinnedImage(source, digest)


def _is_host(name: str) -> bool:
    """True if the first part of a reference is a host: `docker.io/library/x`, not `library/x`."""
    return "." in name or ":" in name or name == "localhost"


def is_within(image: PinnedImage, sources: Collection[str]) -> bool:
    """True if an image lies in one of these sources, or below one."""
    return any(
        image.source == each.rstrip("/") or image.source.startswith(f"{each.rstrip('/')}/")
        for each in sources
    )


def task_template_name(template: str, image: PinnedImage) -> str:
    """Driver's name of a template with a task's image: no pool template has an @ in its name."""
    return f"{template}@{image.digest}"


def pool_template(name: str) -> str:
    """Name of the pool's template of a driver's template."""
    return name.partition("@")[0]
