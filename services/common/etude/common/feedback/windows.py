"""Windows of production rollouts: sealed manifests, and the rollouts that they list.

    windows/<number:012d>.json                    WindowManifest, created once; numbers from 1
    rollouts/<tenant>/<user>/<rollout>.zst        one etude.v1.Rollout, compressed

A rollout lies under its user's prefix, so that an erasure deletes all of a user by listing it. The
manifests stay: they hold pseudonyms and figures, and no tokens.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

import zstandard
from blake3 import blake3
from google.protobuf.message import DecodeError
from pydantic import BaseModel, Field

from etude.common.blobs import MissingError, ObjectInfo, Store
from etude.common.errors import CorruptError
from etude.common.weights import VersionId
from etude.common.weights.protocol import records
from etude.common.weights.protocol.versions import MAX_EPOCH, MAX_NUMBER
from etude.v1 import rollout_pb2

WINDOWS = "windows/"
ROLLOUTS = "rollouts/"
MAX_ROLLOUTS = 20_000
"""Of one window: its manifest has about 500 bytes for each."""
MAX_ROLLOUT_BYTES = 64 << 20
"""Of one rollout before compression: a million tokens have 9 MB."""
_KEY = re.compile(re.escape(WINDOWS) + r"([0-9]{12})\.json")
_ROLLOUT_KEY = re.compile(re.escape(ROLLOUTS) + r"(?:-|[0-9a-f]+)/[0-9a-f]{32}/[0-9a-f]{32}\.zst")

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Pseudonym = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
"""Digest of a user under the ledger's secret."""
Label = Annotated[str, Field(max_length=128)]
Count = Annotated[int, Field(ge=0, le=MAX_NUMBER)]
Figure = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]


class RolloutCounts(BaseModel):
    """Figures of one rollout that monitors read."""

    model_config = records.STRICT

    calls: Count = 0
    broken_calls: Count = 0
    edits: Count = 0
    is_question: bool = False
    """It ended with a question, and changed nothing."""
    tokens: Count = 0
    """Sampled ones."""


class WindowRollout(BaseModel):
    """One rollout to train on."""

    model_config = records.STRICT

    rollout: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    """As `turn_log.identify_rollout` names it."""
    tenant: Label
    user: Pseudonym
    digest: Digest
    """BLAKE3 of the stored object."""
    stratum: Label
    """Rollouts that its reward was compared with, such as "python/edit/team"."""
    reward: Figure
    """Weighted sum of its signals."""
    advantage: Annotated[float, Field(ge=-10, le=10, allow_inf_nan=False)]
    """Reward minus the mean of other users of its stratum, scaled and cut, times the weight of its
    user: what the loss multiplies its tokens with."""
    consent: Label
    """Version of the terms that its user agreed to."""
    counts: RolloutCounts = RolloutCounts()


class WindowExclusion(BaseModel):
    """One served rollout that is not trained on."""

    model_config = records.STRICT

    rollout: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    reason: Annotated[str, Field(pattern=r"^[A-Z][A-Za-z]{0,63}$")]


class WindowManifest(BaseModel):
    """One closed window. Every rollout is in at most one window, once."""

    model_config = records.STRICT

    format: Literal[1] = 1
    number: Annotated[int, Field(ge=1, le=MAX_NUMBER)]
    run_uid: Label
    """Run whose version sampled the rollouts."""
    epoch: Annotated[int, Field(ge=1, le=MAX_EPOCH)]
    version: Annotated[int, Field(ge=0, le=MAX_NUMBER)]
    """With the epoch: the version that sampled all tokens of the rollouts."""
    opened_ms: Annotated[int, Field(ge=0)]
    closed_ms: Annotated[int, Field(ge=0)]
    last_sequence: Annotated[int, Field(ge=0)]
    """Newest record of the feedback ledger that counts in this window."""
    signals: Mapping[Label, Annotated[int, Field(ge=1)]]
    """Versions of the signals by name."""
    rollouts: Annotated[tuple[WindowRollout, ...], Field(max_length=MAX_ROLLOUTS)]
    exclusions: Annotated[tuple[WindowExclusion, ...], Field(max_length=MAX_ROLLOUTS)] = ()
    late: Mapping[Label, Count] = {}
    """Events, by kind, that came since the window before about rollouts of earlier windows. Each
    counts in one window, and trains nothing."""
    findings: Annotated[
        tuple[Annotated[str, Field(max_length=512)], ...], Field(max_length=64)
    ] = ()
    """Sentences of raised monitors."""
    is_frozen: bool = False
    """A raised monitor stops training on this window and promotion of what it led to."""

    @property
    def policy(self) -> VersionId:
        return VersionId(self.epoch, self.version)


def window_key(number: int) -> str:
    """Key of a window's manifest."""
    return f"{WINDOWS}{number:012d}.json"


def rollout_prefix(tenant: str, user: str) -> str:
    """Prefix of all stored rollouts of a user.

    Args:
        tenant: its name.
        user: its pseudonym.
    """
    return f"{ROLLOUTS}{tenant.encode().hex() or '-'}/{user}/"


def rollout_key(tenant: str, user: str, rollout: str) -> str:
    """Key of a stored rollout."""
    return f"{rollout_prefix(tenant, user)}{rollout}.zst"


def list_rollouts(store: Store) -> Iterator[ObjectInfo]:
    """List all stored rollouts of users, not the rows that runs write at the same place.

    Raises:
        StoreError: the store did not answer.
    """
    return (info for info in store.list(ROLLOUTS) if _ROLLOUT_KEY.fullmatch(info.key))


def encode_rollout(rollout: rollout_pb2.Rollout) -> bytes:
    """Encode a rollout as it is stored."""
    return zstandard.ZstdCompressor(level=1, write_checksum=True).compress(
        rollout.SerializeToString(deterministic=True)
    )


def decode_rollout(data: bytes, *, digest: str, where: str) -> rollout_pb2.Rollout:
    """Decode a stored rollout, if it is what the manifest names.

    Raises:
        CorruptError: it is another object, or none.
    """
    if blake3(data).hexdigest() != digest:
        raise CorruptError(f"{where}: content does not match the digest of its window")
    rollout = rollout_pb2.Rollout()
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= MAX_ROLLOUT_BYTES:
            raise CorruptError(f"{where}: {size} bytes, at most {MAX_ROLLOUT_BYTES} are read")
        rollout.ParseFromString(zstandard.ZstdDecompressor().decompress(data))
    except (zstandard.ZstdError, DecodeError) as error:
        raise CorruptError(f"{where}: no rollout: {error}") from error
    return rollout


def read_rollout(store: Store, entry: WindowRollout) -> rollout_pb2.Rollout:
    """Read a rollout that a window lists.

    Raises:
        MissingError: there is none, for example because its user was erased.
        CorruptError: it is not what the window names.
        StoreError: the store did not answer.
    """
    key = rollout_key(entry.tenant, entry.user, entry.rollout)
    where = f"{store.url}/{key}"
    found = store.head(key)
    if found is None:
        raise MissingError(f"{where}: missing")
    if found.size > MAX_ROLLOUT_BYTES:
        raise CorruptError(f"{where}: {found.size} bytes, more than {MAX_ROLLOUT_BYTES}")
    return decode_rollout(store.get(key), digest=entry.digest, where=where)


def create_window(store: Store, manifest: WindowManifest) -> WindowManifest:
    """Create a window; return the one that has its number now: this, or another writer's.

    Raises:
        StoreError: the store did not answer; call again.
    """
    key = window_key(manifest.number)
    data = records.create_once(store, key, records.to_bytes(manifest))
    return records.parse(WindowManifest, data, where=f"{store.url}/{key}")


def read_window(store: Store, number: int) -> WindowManifest:
    """Read a window.

    Raises:
        MissingError: there is none with this number.
        CorruptError: it is damaged.
        StoreError: the store did not answer.
    """
    key = window_key(number)
    manifest = records.parse(WindowManifest, records.fetch(store, key), where=f"{store.url}/{key}")
    if manifest.number != number:
        raise CorruptError(f"{store.url}/{key}: holds window {manifest.number}")
    return manifest


def list_windows(store: Store, *, after: int = 0) -> Iterator[int]:
    """Numbers of the windows behind one, in order."""
    for info in store.list(WINDOWS, after=window_key(after) if after else ""):
        found = _KEY.fullmatch(info.key)
        if found:
            yield int(found[1])
