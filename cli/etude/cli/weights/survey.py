"""Survey of every published version, without reading a weight."""

from typing import Literal, NamedTuple

from etude.common.blobs import MissingError, Store, StoreRefusedError
from etude.common.errors import CorruptError
from etude.common.weights.protocol.chain import accepted_chain
from etude.common.weights.protocol.epochs import epochs_of
from etude.common.weights.protocol.listing import Listing, take_listing
from etude.common.weights.protocol.manifest import WeightManifest, read_manifest
from etude.common.weights.protocol.quarantine import list_quarantined
from etude.common.weights.protocol.versions import VersionId, epoch_key, list_all_published

Standing = Literal["accepted", "abandoned", "quarantined", "damaged", "unreadable"]


class VersionSummary(NamedTuple):
    """One published version."""

    version: VersionId
    standing: Standing
    manifest: WeightManifest | None
    """None if it is damaged or cannot be read."""
    has_keyframe: bool
    skips_from: tuple[VersionId, ...]
    """Versions from which a skip leads here."""
    problem: str = ""
    """What is wrong with the manifest, or with the record of its epoch."""


def survey(store: Store) -> list[VersionSummary]:
    """Every version that has a manifest, by epoch and number; what is wrong with one stops none.

    Raises:
        CorruptError: an epoch is damaged.
        StoreError: the store failed.
    """
    accepted, refused = set(accepted_chain(store)), list_quarantined(store)
    listing, epochs = take_listing(store), set(epochs_of(store))
    found = []
    for version in list_all_published(store):
        standing: Standing = "accepted" if version in accepted else "abandoned"
        if version in refused:
            standing = "quarantined"
        manifest, problem = None, ""
        if version.epoch not in epochs:
            standing, problem = "damaged", f"{store.url}/{epoch_key(version.epoch)}: missing"
        try:
            manifest = read_manifest(store, version)
        except MissingError:
            continue  # collected since it was listed
        except CorruptError as error:
            standing, problem = "damaged", str(error)
        except StoreRefusedError as error:
            standing, problem = "unreadable", str(error)
        found.append(_surveyed(version, standing, manifest, listing, problem))
    return found


class StoredObject(NamedTuple):
    """One object of a version, as the store has it."""

    key: str
    rank: int | None
    """Of the publisher whose payload it is; None for the manifest."""
    bytes: int | None
    """None if it is not there any more."""
    index_bytes: int | None = None
    """The part of a payload that says where its blocks lie; the rest are blocks."""


def objects_of(store: Store, version: VersionId) -> list[StoredObject]:
    """Objects of a version: its manifest, then the payload of each rank.

    Raises:
        CorruptError: the manifest is damaged.
        MissingError: no such version was published, or it was deleted.
        StoreError: the store failed.
    """
    manifest = read_manifest(store, version)
    key = version.manifest_key
    found = [StoredObject(key, None, _size(store, key))]
    for item in manifest.objects:
        size = _size(store, item.key)
        found.append(StoredObject(item.key, item.rank, size, item.index_length))
    return found


def _size(store: Store, key: str) -> int | None:
    info = store.head(key)
    return None if info is None else info.size


def _surveyed(
    version: VersionId,
    standing: Standing,
    manifest: WeightManifest | None,
    listing: Listing,
    problem: str,
) -> VersionSummary:
    keyframe = listing.keyframes.get(version)
    spans = [s for s, skip in listing.skips.items() if s.target == version and skip.record]
    return VersionSummary(
        version,
        standing,
        manifest,
        keyframe is not None and keyframe.record is not None,
        tuple(sorted(span.base for span in spans)),
        problem,
    )
