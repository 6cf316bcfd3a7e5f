"""Every published version at a glance, without reading a weight."""

from typing import Literal, NamedTuple

from etude.common.blobs import MissingError, Store
from etude.common.errors import CorruptError
from etude.common.weights.protocol.chain import accepted_chain
from etude.common.weights.protocol.listing import Listing, take_listing
from etude.common.weights.protocol.manifest import WeightManifest, read_manifest
from etude.common.weights.protocol.quarantine import quarantined
from etude.common.weights.protocol.versions import VersionId, all_published

Standing = Literal["accepted", "abandoned", "quarantined", "damaged"]


class Surveyed(NamedTuple):
    """One published version."""

    version: VersionId
    standing: Standing
    manifest: WeightManifest | None
    """None if it is damaged."""
    has_keyframe: bool
    skips_from: tuple[VersionId, ...]
    """Versions from which a skip leads here."""
    problem: str = ""
    """What is wrong with the manifest."""


def survey(store: Store) -> list[Surveyed]:
    """Every version that has a manifest, by epoch and number.

    Raises:
        CorruptError: an epoch is damaged.
        StoreError: the store failed.
    """
    accepted, refused = set(accepted_chain(store)), quarantined(store)
    listing = take_listing(store)
    found = []
    for version in all_published(store):
        standing: Standing = "accepted" if version in accepted else "abandoned"
        if version in refused:
            standing = "quarantined"
        manifest, problem = None, ""
        try:
            manifest = read_manifest(store, version)
        except MissingError:
            continue  # collected since it was listed
        except CorruptError as error:
            standing, problem = "damaged", str(error)
        found.append(_surveyed(version, standing, manifest, listing, problem))
    return found


def _surveyed(
    version: VersionId,
    standing: Standing,
    manifest: WeightManifest | None,
    listing: Listing,
    problem: str,
) -> Surveyed:
    keyframe = listing.keyframes.get(version)
    spans = [s for s, skip in listing.skips.items() if s.target == version and skip.record]
    return Surveyed(
        version,
        standing,
        manifest,
        keyframe is not None and keyframe.record is not None,
        tuple(sorted(span.base for span in spans)),
        problem,
    )
