"""Verification that every path to every version leads to the bits that were published."""

from collections.abc import Iterator, Set
from pathlib import Path
from typing import NamedTuple

from etude.common.blobs import MissingError, Store, StoreRefusedError
from etude.common.errors import CorruptError
from etude.common.weights.protocol.chain import accepted_chain
from etude.common.weights.protocol.folded import read_keyframe, read_skip
from etude.common.weights.protocol.listing import take_listing
from etude.common.weights.protocol.manifest import read_manifest
from etude.common.weights.protocol.plan import Edge
from etude.common.weights.protocol.quarantine import list_quarantined
from etude.common.weights.protocol.versions import VersionId
from etude.common.weights.replicas.mirror import Mirror

UNPROVABLE = "unprovable"
"""The way to a version that stays for readers who have it: what it began with was collected."""


class PathVerdict(NamedTuple):
    """Result for one path to one version."""

    version: VersionId
    way: str
    """Which edges were gone: delta, complete, keyframe, skip from a version; UNPROVABLE if none."""
    problem: str
    """Why it does not lead there; empty if it does."""


def verify(store: Store, folder: Path, *, run: str | None = None) -> Iterator[PathVerdict]:
    """Read every accepted version and every skip and keyframe, and compare the states they lead to.

    Quarantined versions are not read. What is damaged, missing or unreadable stops nothing.

    Args:
        store: the run's store.
        folder: an empty one, for one copy of the model.
        run: UID that manifests must carry; None takes any.

    Raises:
        CorruptError: an epoch is damaged.
        StoreError: the store failed.
    """
    refused = list_quarantined(store)
    mirror = Mirror(store, folder, run=run)
    chain = accepted_chain(store)
    headless = _headless(store, chain, refused)
    for version in chain:
        if version in refused:
            continue
        if version in headless:
            yield PathVerdict(version, UNPROVABLE, "")
            continue
        try:
            edges = mirror.move_to(version)
        except (CorruptError, MissingError, StoreRefusedError) as error:
            yield PathVerdict(version, "any", str(error))
            continue
        yield PathVerdict(version, ", ".join(_word(edge) for edge in edges) or "same state", "")
        yield from _check_alternatives(store, mirror, version)


def _headless(store: Store, chain: list[VersionId], refused: Set[VersionId]) -> list[VersionId]:
    """The versions before the first whole one, if a collector took what they build on."""
    listing = take_listing(store)
    records = {version for version, each in listing.keyframes.items() if each.record is not None}
    whole = (listing.complete | records) - refused
    places = [place for place, version in enumerate(chain) if version in whole]
    if not places or not places[0]:
        return []
    try:
        base = read_manifest(store, chain[0]).base
    except (CorruptError, MissingError, StoreRefusedError):
        return []
    is_collected = base is not None and store.head(base.version.manifest_key) is None
    return chain[: places[0]] if is_collected else []


def _check_alternatives(store: Store, mirror: Mirror, version: VersionId) -> Iterator[PathVerdict]:
    """Verdicts on what is not on the cheapest way: the keyframe here, the skips from here."""
    listing = take_listing(store)
    keyframe = listing.keyframes.get(version)
    if keyframe is not None and keyframe.record is not None:
        yield _check_alternative(mirror, store, version, None)
    for span, skip in sorted(listing.skips.items(), key=lambda item: item[0]):
        if span.base == version and skip.record is not None:
            yield _check_alternative(mirror, store, span.target, version)


def _check_alternative(
    mirror: Mirror, store: Store, target: VersionId, base: VersionId | None
) -> PathVerdict:
    way = "keyframe" if base is None else f"skip from {base}"
    try:
        edge = _edge(store, target, base)
        state = mirror.predict_state(edge).hex()
    except (CorruptError, MissingError, StoreRefusedError) as error:
        return PathVerdict(target, way, str(error))
    if edge.base is not None and edge.base != mirror.ref:
        return PathVerdict(target, way, f"builds on another {base}")
    if state != edge.target.state:
        return PathVerdict(target, way, f"leads to state {state}, not {edge.target.state}")
    return PathVerdict(target, way, "")


def _edge(store: Store, target: VersionId, base: VersionId | None) -> Edge:
    if base is None:
        whole = read_keyframe(store, target)
        return Edge("keyframe", None, whole.target, whole.schema_sha256, whole.objects)
    skip = read_skip(store, base, target)
    return Edge("skip", skip.base, skip.target, skip.schema_sha256, skip.objects)


def _word(edge: Edge) -> str:
    if edge.kind == "skip" and edge.base is not None:
        return f"skip from {edge.base.version}"
    return edge.kind
