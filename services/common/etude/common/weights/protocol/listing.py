"""What the store holds of each version, from a few listings and without reading an object."""

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


class Span(NamedTuple):
    """From where to where a skip leads."""

    base: VersionId
    target: VersionId


@dataclass(slots=True)
class Folded:
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
    skips: dict[Span, Folded] = field(default_factory=dict)
    keyframes: dict[VersionId, Folded] = field(default_factory=dict)

    @property
    def newest_s(self) -> float:
        """When the newest object was written, by the store's clock: no later than its now."""
        folded = [*self.skips.values(), *self.keyframes.values()]
        infos = [info for each in folded for info in each.objects]
        infos += [info for each in self.payloads.values() for info in each]
        return max((info.modified_s for info in infos), default=0.0)


def take_listing(store: Store) -> Listing:
    """List payloads, skips and keyframes; foreign keys are passed over."""
    found = Listing()
    for info in store.list(DELTAS):
        delta = parse_delta_key(info.key)
        if delta is not None:
            found.payloads.setdefault(delta.version, []).append(info)
            if delta.complete:
                found.complete.add(delta.version)
    for info in store.list(SKIPS):
        skip = parse_skip_key(info.key)
        if skip is not None:
            span = Span(skip.base, skip.target)
            found.skips.setdefault(span, Folded()).add(info, skip.part)
    for info in store.list(KEYFRAMES):
        keyframe = parse_keyframe_key(info.key)
        if keyframe is not None:
            found.keyframes.setdefault(keyframe.version, Folded()).add(info, keyframe.part)
    return found
