"""Retention: decides which objects stay and which may be deleted."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from etude.common.blobs import ObjectInfo
from etude.common.weights.protocol.listing import FoldedObjects, Listing
from etude.common.weights.protocol.versions import VersionId

ORPHAN_S = 3_600.0
"""Payloads that nothing names are an upload in progress until they are this old."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roots:
    """Versions from which readers or a resumed run may go on."""

    leased: frozenset[VersionId] = frozenset()
    """Readers have these, or begin with them."""
    resumable: frozenset[VersionId] = frozenset()
    """Of retained checkpoints: replicas without weights must get there, and on from there."""
    served: frozenset[VersionId] = frozenset()
    """Of channels: replicas without weights must get there, and the run has gone on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Minimum numbers of versions and keyframes that are never deleted."""

    versions: int = 200
    keyframes: int = 2

    def __post_init__(self) -> None:
        if self.versions < 1 or self.keyframes < 1:
            raise ValueError("the newest version and the newest keyframe are always kept")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """Objects in the store."""

    epoch: int
    """The open one."""
    chain: Sequence[VersionId]
    """Accepted, oldest first."""
    published: frozenset[VersionId]
    """With a manifest, accepted or not."""
    lineages: Sequence[Sequence[VersionId]]
    """Of each resumable root that was abandoned, and each served one: it and what is before it,
    oldest first."""
    listing: Listing
    anchors: frozenset[VersionId]
    """Versions at which a replica without weights can begin: complete ones and sound keyframes."""


class RetentionPlan(NamedTuple):
    """Versions and keyframes that must stay."""

    versions: frozenset[VersionId]
    keyframes: frozenset[VersionId]


def plan_retention(inventory: Inventory, roots: Roots, retention: Retention) -> RetentionPlan:
    """Decide what must stay: the chain from the oldest root on, and the anchor of each root.

    Of a served version only what leads to it stays, not the chain from it to the newest one.
    """
    if not inventory.chain:
        return RetentionPlan(inventory.published, frozenset(inventory.listing.keyframes))
    versions = _kept_versions(inventory, roots, retention)
    return RetentionPlan(versions, _kept_keyframes(inventory, roots, retention, versions))


def required_keys(inventory: Inventory, kept: RetentionPlan) -> set[str]:
    """Keys that must stay: no announced deletion that names one of them is carried out."""
    keys: set[str] = set()
    for version in inventory.published:
        if version in kept.versions or _is_ahead(inventory, version):
            keys.add(version.manifest_key)
    for version, infos in inventory.listing.payloads.items():
        if version in kept.versions or _is_ahead(inventory, version):
            keys |= {info.key for info in infos}
    for folded, is_kept in _folded(inventory, kept):
        keys |= {info.key for info in folded.objects if is_kept}
    return keys


def deletable_keys(inventory: Inventory, kept: RetentionPlan) -> list[str]:
    """Keys that are not needed, in the order of deletion.

    Manifests newest first, so that no chain has a hole while it shrinks; then the records of skips
    and keyframes, so that none is found whose payloads are gone; then payloads.
    """
    dead = {
        version
        for version in inventory.published - kept.versions
        if not _is_ahead(inventory, version)
    }
    newest_s = inventory.listing.newest_s
    records: list[str] = []
    payloads: list[str] = []
    for version, infos in inventory.listing.payloads.items():
        if version in dead:
            payloads += [info.key for info in infos]
        elif version not in inventory.published and not _is_ahead(inventory, version):
            payloads += _old(infos, newest_s)
    for folded, is_kept in _folded(inventory, kept):
        if is_kept:
            continue
        if folded.record is None:
            payloads += _old(folded.parts, newest_s)
        else:
            records.append(folded.record.key)
            payloads += [info.key for info in folded.parts]
    manifests = [version.manifest_key for version in sorted(dead, reverse=True)]
    return manifests + sorted(records) + sorted(payloads)


def _is_ahead(inventory: Inventory, version: VersionId) -> bool:
    """Return true if the publisher may publish it now, or has since the chain was listed."""
    chain = inventory.chain
    return version.epoch >= inventory.epoch and (not chain or version > chain[-1])


def _folded(inventory: Inventory, kept: RetentionPlan) -> Iterator[tuple[FoldedObjects, bool]]:
    for version, keyframe in inventory.listing.keyframes.items():
        yield keyframe, version in kept.keyframes
    for span, skip in inventory.listing.skips.items():
        yield skip, set(span) <= kept.versions


def _old(infos: Iterable[ObjectInfo], newest_s: float) -> list[str]:
    # The newest object stands for now, by the store's own clock: an age comes out too small.
    return [info.key for info in infos if info.modified_s + ORPHAN_S <= newest_s]


def _kept_versions(
    inventory: Inventory, roots: Roots, retention: Retention
) -> frozenset[VersionId]:
    chain = inventory.chain
    needed = [chain[max(0, len(chain) - retention.versions)], _anchor(inventory, chain, chain[-1])]
    needed += [_anchor(inventory, chain, root) for root in roots.resumable & set(chain)]
    needed += [_at_or_before(chain, root) for root in roots.leased]
    kept = {version for version in chain if version.number >= min(needed).number}
    for line in inventory.lineages:
        first = _anchor(inventory, line, line[-1])
        kept |= {version for version in line if version.number >= first.number}
    return frozenset(kept)


def _kept_keyframes(
    inventory: Inventory, roots: Roots, retention: Retention, kept: frozenset[VersionId]
) -> frozenset[VersionId]:
    chain, keyframes = inventory.chain, inventory.listing.keyframes
    sound = [version for version in chain if version in keyframes.keys() & inventory.anchors]
    newest = sound[-retention.keyframes :]
    wanted = {*newest, *roots.leased}
    wanted |= {_anchor(inventory, chain, root) for root in roots.resumable & set(chain)}
    wanted |= {_anchor(inventory, line, line[-1]) for line in inventory.lineages}
    # One that is being written has no record yet.
    last = newest[-1] if newest else chain[0]
    wanted |= {
        version
        for version, each in keyframes.items()
        if each.record is None and version.number >= last.number
    }
    return frozenset(wanted & kept)


def _anchor(inventory: Inventory, line: Sequence[VersionId], root: VersionId) -> VersionId:
    """Version of a lineage at which a replica without weights begins."""
    found = [
        version
        for version in line
        if version in inventory.anchors and version.number <= root.number
    ]
    return found[-1] if found else line[0]


def _at_or_before(chain: Sequence[VersionId], version: VersionId) -> VersionId:
    found = [each for each in chain if each.number <= version.number]
    return found[-1] if found else chain[0]
