"""The identity of a policy version, and the keys of what belongs to it."""

import re
from collections.abc import Iterator
from typing import NamedTuple, Self

from typing_extensions import override

from etude.common.blobs import Store
from etude.v1 import weights_pb2

EPOCHS = "weights/epochs/"
MANIFESTS = "weights/manifests/"
PAYLOADS = "weights/full/"

MAX_EPOCH = 999_999
MAX_NUMBER = 999_999_999_999
"""What the fixed width of the keys can hold; sorting by key is sorting by number."""

_TEXT = re.compile(r"(0|[1-9][0-9]{0,5})\.(0|[1-9][0-9]{0,11})")
_MANIFEST_KEY = re.compile(re.escape(MANIFESTS) + r"([0-9]{6})/([0-9]{12})\.json")
_PAYLOAD_KEY = re.compile(re.escape(PAYLOADS) + r"([0-9]{1,6})-([0-9]{1,12})/[^/]+")


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
    def payload_prefix(self) -> str:
        """Prefix of the keys of this version's tensors."""
        return f"{PAYLOADS}{self.epoch}-{self.number}/"


def epoch_key(epoch: int) -> str:
    """Key of the record that opens an epoch."""
    return f"{EPOCHS}{epoch:06d}.json"


def published(store: Store, epoch: int) -> list[VersionId]:
    """Versions of one epoch that have a manifest, oldest first."""
    return list(_versions(store, f"{MANIFESTS}{epoch:06d}/"))


def all_published(store: Store) -> list[VersionId]:
    """Versions of every epoch that have a manifest, by key."""
    return list(_versions(store, MANIFESTS))


def _versions(store: Store, prefix: str) -> Iterator[VersionId]:
    for info in store.list(prefix):
        found = _MANIFEST_KEY.fullmatch(info.key)
        if found is not None:
            yield VersionId(int(found[1]), int(found[2]))


def payload_owner(key: str) -> VersionId | None:
    """The version that a payload key belongs to; None for a foreign key."""
    found = _PAYLOAD_KEY.fullmatch(key)
    return None if found is None else VersionId(int(found[1]), int(found[2]))
