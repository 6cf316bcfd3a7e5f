"""Removal of images: none that a pool names, and none that a host boots."""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.common.blobs import Store
from etude.common.errors import Problem, UserError
from etude.envserver.images import built_image, image_store
from etude.envserver.images.build_cache import BuildCache
from etude.envserver.images.built_image import MANIFEST, BuiltImage
from etude.envserver.images.pull import pulled_image

KINDS = ("images", image_store.KIND, pulled_image.KIND)
"""Folders of the cache: built images, fetched ones, and those that tasks name by digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredImage:
    """One image, in the cache or a store."""

    kind: str
    """Its folder in the cache; empty in a store."""
    name: str
    """Name in its spec; empty in a store, which knows addresses only."""
    address: str
    num_bytes: int
    changed_s: float
    is_newest: bool = False
    """True for the newest image of its name."""

    def is_named(self, references: Collection[str]) -> bool:
        """True if one of these references means it."""
        found = {each.rstrip("/").rpartition("/")[2] for each in references}
        return self.address in found or (self.is_newest and self.name in found)


def list_cached(cache: BuildCache) -> list[StoredImage]:
    """List the images of a cache, oldest first in each folder."""
    return [
        each
        for kind in KINDS
        for each in _present_images(built_image.list_images(cache, kind), kind)
    ]


def _present_images(found: Sequence[BuiltImage], kind: str) -> Iterator[StoredImage]:
    """Images of one listing that still exist."""
    newest = {image.name: image.address for image in found if kind == "images"}
    for image in found:
        with contextlib.suppress(FileNotFoundError):
            yield StoredImage(
                kind=kind,
                name=image.name,
                address=image.address,
                num_bytes=_size(image.folder),
                changed_s=image.folder.stat().st_mtime,
                is_newest=newest.get(image.name) == image.address,
            )


def list_stored(store: Store) -> list[StoredImage]:
    """List the images of a store's folder, incomplete ones too."""
    sizes: dict[str, int] = {}
    changed_s: dict[str, float] = {}
    for info in store.list(""):
        address, _, file = info.key.partition("/")
        if file and "/" not in file and image_store.is_reference(address):
            sizes[address] = sizes.get(address, 0) + info.size
            changed_s[address] = max(changed_s.get(address, 0.0), info.modified_s)
    return [
        StoredImage(kind="", name="", address=each, num_bytes=size, changed_s=changed_s[each])
        for each, size in sorted(sizes.items())
    ]


def prunable(
    kept: Iterable[StoredImage], references: Collection[str], *, before_s: float
) -> list[StoredImage]:
    """Old images that no template names, by address or as the newest of a name.

    The newest image of each name stays, named or not: it is what a build would make again.
    """
    return [
        each
        for each in kept
        if not each.is_newest and each.changed_s < before_s and not each.is_named(references)
    ]


def select_removable(
    kept: Sequence[StoredImage], image: str, references: Collection[str], *, url: str | None = None
) -> list[StoredImage]:
    """Select the images of a name or address for removal.

    Args:
        kept: the present images.
        image: a name or an address.
        references: images that templates name.
        url: of the store; None: the cache.

    Raises:
        UserError: there is none, or a template names one of them.
    """
    found = [each for each in kept if image in {each.address, each.name} - {""}]
    if not found:
        what, fix = "is not an image in the cache", "list the images: etude images ls"
        if url is not None:
            what, fix = "is not an image of this store", f"give the name of a folder below {url}"
        raise UserError(Problem("NotFound", what, image, fix))
    for each in found:
        if each.is_named(references):
            what = f"a template boots {each.address}"
            fix = "take it out of spec.templates first, then run this again"
            raise UserError(Problem("Conflict", what, image, fix))
    return found


def remove_cached(
    cache: BuildCache, going: Iterable[StoredImage]
) -> Iterator[tuple[StoredImage, bool]]:
    """Remove images; yields each with True if removed: an image that a host boots stays."""
    for each in going:
        yield each, cache.remove(each.kind, each.address)


def remove_stored(store: Store, going: Iterable[StoredImage]) -> Iterator[tuple[StoredImage, bool]]:
    """Remove images from a store: first the manifests, without which the rest is no image."""
    for each in going:
        keys = [info.key for info in store.list(f"{each.address}/")]
        store.delete([f"{each.address}/{MANIFEST}"])
        store.delete(keys)
        yield each, True


def _size(folder: Path) -> int:
    """Disk space of a folder."""
    return sum(512 * path.stat().st_blocks for path in folder.iterdir())
