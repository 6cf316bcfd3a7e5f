"""The identity of a policy version, and the keys of what belongs to it."""

import re
from collections.abc import Iterator
from typing import NamedTuple, Self

from typing_extensions import override

from etude.common.blobs import Store
from etude.v1 import weights_pb2

EPOCHS = "weights/epochs/"
MANIFESTS = "weights/manifests/"
SCHEMAS = "weights/schema/"
DELTAS = "weights/deltas/"
SKIPS = "weights/skips/"
KEYFRAMES = "weights/keyframes/"
QUARANTINE = "weights/quarantine/"
TRASH = "weights/trash/"
LEASES = "weights/leases/"
SUSPECTS = "weights/suspects/"

MAX_EPOCH = 999_999
MAX_NUMBER = 999_999_999_999
"""What the fixed width of the keys can hold; sorting by key is sorting by number."""

MAX_LAG = 8
"""Versions that a replica may be behind: beyond, it gets no requests, and its run says so."""

_TEXT = re.compile(r"(0|[1-9][0-9]{0,5})\.(0|[1-9][0-9]{0,11})")
_MANIFEST_KEY = re.compile(re.escape(MANIFESTS) + r"([0-9]{6})/([0-9]{12})\.json")
_ID = r"([0-9]{6})-([0-9]{12})"
_ID_KEY = re.compile(_ID)
_PART = r"p([0-9]{4})-[0-9a-f]{16}"
_DELTA_KEY = re.compile(
    re.escape(DELTAS) + r"([0-9]{6})/([0-9]{12})/r([0-9]{4})-[0-9a-f]{16}\.(dlt|kf)"
)
_SKIP_KEY = re.compile(re.escape(SKIPS) + rf"{_ID}/{_ID}(?:\.json|-{_PART}\.dlt)")
_KEYFRAME_KEY = re.compile(re.escape(KEYFRAMES) + rf"{_ID}/(?:keyframe\.json|{_PART}\.kf)")


class VersionId(NamedTuple):
    """One published state of the weights.

    Identity is the pair. Along the accepted chain the order of pairs is the order of numbers.
    """

    epoch: int
    number: int

    @override
    def __str__(self) -> str:
        return f"{self.epoch}.{self.number}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The version written as "3.128".

        Raises:
            ValueError: the text is no version.
        """
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is no policy version; expected epoch.number, like 3.128")
        return cls(int(found[1]), int(found[2]))

    @classmethod
    def from_proto(cls, message: weights_pb2.PolicyVersion) -> Self:
        """The version that a message names."""
        return cls(message.epoch, message.number)

    def to_proto(self) -> weights_pb2.PolicyVersion:
        """This version on the wire."""
        return weights_pb2.PolicyVersion(epoch=self.epoch, number=self.number)

    @property
    def manifest_key(self) -> str:
        """Key of the object that commits this version."""
        return f"{MANIFESTS}{self.epoch:06d}/{self.number:012d}.json"

    @property
    def label(self) -> str:
        """The version in keys, where sorting is by epoch and number."""
        return f"{self.epoch:06d}-{self.number:012d}"


def epoch_key(epoch: int) -> str:
    """Key of the record that opens an epoch."""
    return f"{EPOCHS}{epoch:06d}.json"


def list_published(store: Store, epoch: int, *, after: str = "") -> list[VersionId]:
    """Versions of one epoch that have a manifest after some key, oldest first."""
    return list(_versions(store, f"{MANIFESTS}{epoch:06d}/", after))


def list_all_published(store: Store) -> list[VersionId]:
    """Versions of every epoch that have a manifest, by key."""
    return list(_versions(store, MANIFESTS))


def _versions(store: Store, prefix: str, after: str = "") -> Iterator[VersionId]:
    for info in store.list(prefix, after):
        found = parse_manifest_key(info.key)
        if found is not None:
            yield found


def schema_key(sha256: str) -> str:
    """Key of a schema, by the SHA-256 of its bytes."""
    return f"{SCHEMAS}{sha256}.json"


def delta_key(version: VersionId, rank: int, sha16: str, *, complete: bool = False) -> str:
    """Key of what one rank publishes of a version; `sha16` begins the SHA-256 of its bytes."""
    suffix = "kf" if complete else "dlt"
    return f"{DELTAS}{version.epoch:06d}/{version.number:012d}/r{rank:04d}-{sha16}.{suffix}"


def skip_key(base: VersionId, target: VersionId) -> str:
    """Key of the record of a folded delta."""
    return f"{SKIPS}{target.label}/{base.label}.json"


def skip_part_key(base: VersionId, target: VersionId, part: int, sha16: str) -> str:
    """Key of one payload of a folded delta."""
    return f"{SKIPS}{target.label}/{base.label}-p{part:04d}-{sha16}.dlt"


def keyframe_key(version: VersionId) -> str:
    """Key of the record of a keyframe."""
    return f"{KEYFRAMES}{version.label}/keyframe.json"


def keyframe_part_key(version: VersionId, part: int, sha16: str) -> str:
    """Key of one payload of a keyframe."""
    return f"{KEYFRAMES}{version.label}/p{part:04d}-{sha16}.kf"


def quarantine_key(version: VersionId) -> str:
    """Key of the record that quarantines a version."""
    return f"{QUARANTINE}{version.label}.json"


class DeltaKey(NamedTuple):
    """Fields of the key of a version's payload."""

    version: VersionId
    rank: int
    complete: bool


class SkipKey(NamedTuple):
    """Fields of a key of a folded delta."""

    base: VersionId
    target: VersionId
    part: int | None
    """None for the record."""


class KeyframeKey(NamedTuple):
    """Fields of a key of a keyframe."""

    version: VersionId
    part: int | None
    """None for the record."""


def parse_delta_key(key: str) -> DeltaKey | None:
    """Parse a key; None for a foreign one."""
    found = _DELTA_KEY.fullmatch(key)
    if found is None:
        return None
    return DeltaKey(VersionId(int(found[1]), int(found[2])), int(found[3]), found[4] == "kf")


def parse_skip_key(key: str) -> SkipKey | None:
    """Parse a key; None for a foreign one."""
    found = _SKIP_KEY.fullmatch(key)
    if found is None:
        return None
    target, base = VersionId(int(found[1]), int(found[2])), VersionId(int(found[3]), int(found[4]))
    return SkipKey(base, target, None if found[5] is None else int(found[5]))


def parse_keyframe_key(key: str) -> KeyframeKey | None:
    """Parse a key; None for a foreign one."""
    found = _KEYFRAME_KEY.fullmatch(key)
    if found is None:
        return None
    part = None if found[3] is None else int(found[3])
    return KeyframeKey(VersionId(int(found[1]), int(found[2])), part)


def parse_manifest_key(key: str) -> VersionId | None:
    """The version that a manifest commits; None for a foreign key."""
    found = _MANIFEST_KEY.fullmatch(key)
    return None if found is None else VersionId(int(found[1]), int(found[2]))


def parse_label(text: str) -> VersionId | None:
    """The version that a part of a key names; None if it names none."""
    found = _ID_KEY.fullmatch(text)
    return None if found is None else VersionId(int(found[1]), int(found[2]))
