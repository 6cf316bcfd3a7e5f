"""Listing of the objects of each version, without reading an object."""

from dataclasses import dataclass, field
from typing import NamedTuple

from etude.common.blobs import ObjectInfo, Store
from etude.common.weights.protocol.versions import (
    DELTAS,
    KEYFRAMES,
    SKIPS,
    VersionId,
    parse_delta_key,
    parse_keyframe_key,
    parse_skip_key,
)


class SkipSpan(NamedTuple):
    """Base and target of a skip."""

    base: VersionId
    target: VersionId


@dataclass(slots=True)
class FoldedObjects:
    """One skip or keyframe: without a record it does not exist yet, or not any more."""

    record: ObjectInfo | None = None
    parts: list[ObjectInfo] = field(default_factory=list)

    def add(self, info: ObjectInfo, part: int | None) -> None:
        """Take one of its objects in."""
        if part is None:
            self.record = info
        else:
            self.parts.append(info)

    @property
    def objects(self) -> list[ObjectInfo]:
        """The record, if there is one, then the parts."""
        return [*([] if self.record is None else [self.record]), *self.parts]


@dataclass(slots=True)
class Listing:
    """Everything with a payload."""

    payloads: dict[VersionId, list[ObjectInfo]] = field(default_factory=dict)
    complete: set[VersionId] = field(default_factory=set)
    """Versions that were published without a base."""
    skips: dict[SkipSpan, FoldedObjects] = field(default_factory=dict)
    keyframes: dict[VersionId, FoldedObjects] = field(default_factory=dict)

    @property
    def newest_s(self) -> float:
        """Time of the newest object by the store's clock: no later than its present time."""
        folded = [*self.skips.values(), *self.keyframes.values()]
        infos = [info for each in folded for info in each.objects]
        infos += [info for each in self.payloads.values() for info in each]
        return max((info.modified_s for info in infos), default=0.0)


def take_listing(store: Store) -> Listing:
    """List payloads, skips and keyframes; foreign keys are passed over."""
    return _listed(store, Listing(), None)


def refresh_listing(store: Store, known: Listing, since: VersionId) -> Listing:
    """Update a listing: keep older versions, and list this one and newer ones again."""
    older = Listing(
        {version: infos for version, infos in known.payloads.items() if version < since},
        {version for version in known.complete if version < since},
        {span: skip for span, skip in known.skips.items() if span.target < since},
        {version: each for version, each in known.keyframes.items() if version < since},
    )
    return _listed(store, older, since)


def _listed(store: Store, found: Listing, since: VersionId | None) -> Listing:
    # A folder's name sorts before everything in it.
    folder = "" if since is None else f"{DELTAS}{since.epoch:06d}/{since.number:012d}"
    for info in store.list(DELTAS, folder):
        delta = parse_delta_key(info.key)
        if delta is not None:
            found.payloads.setdefault(delta.version, []).append(info)
            if delta.complete:
                found.complete.add(delta.version)
    for info in store.list(SKIPS, "" if since is None else f"{SKIPS}{since.label}"):
        skip = parse_skip_key(info.key)
        if skip is not None:
            span = SkipSpan(skip.base, skip.target)
            found.skips.setdefault(span, FoldedObjects()).add(info, skip.part)
    for info in store.list(KEYFRAMES, "" if since is None else f"{KEYFRAMES}{since.label}"):
        keyframe = parse_keyframe_key(info.key)
        if keyframe is not None:
            found.keyframes.setdefault(keyframe.version, FoldedObjects()).add(info, keyframe.part)
    return found
