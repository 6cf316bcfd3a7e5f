"""Publisher of one rank: encodes the changes of its shard between steps, uploads them later.

Only tensors that the checkpoint's layout scatters are gathered; only changed elements are copied.
The changes of a version are kept until the next one builds on it, so a version that is never
published loses nothing. Encoded payloads wait in memory for their upload, which needs neither the
weights nor the other ranks.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from etude.common.api.run.weights import Weights
from etude.common.blobs import Store
from etude.common.errors import WrongStateError
from etude.common.weights.coding.container import Container
from etude.common.weights.protocol import publication
from etude.common.weights.protocol.manifest import VersionRef
from etude.common.weights.protocol.versions import VersionId
from etude.common.weights.tensors.digest import Digest
from etude.common.weights.tensors.schema import difference, parse_schema
from etude.trainer.export.change_tracker import Changes, Tracker, joined
from etude.trainer.export.codec_choice import Link
from etude.trainer.export.receipts import (
    Base,
    NonFiniteWeightsError,
    PeerFailedError,
    Receipt,
    SchemaChangedError,
    combined,
    payload_of,
)
from etude.trainer.export.shard_packer import Packed, Share
from etude.trainer.model.fsdp import Ranks
from etude.trainer.model.parameters import Steps
from etude.trainer.model.policy import Policy

T = TypeVar("T")

_PREFIX = "model."
"""Of a policy's parameters before the model's own names."""


class _Sent(NamedTuple):
    """The newest encoded version of this rank, perhaps not published yet."""

    version: VersionId
    base: VersionRef | None
    digests: list[Digest]
    """Of each part, in this version."""
    receipt: Receipt


class _Waiting(NamedTuple):
    """An encoded payload that is not stored yet."""

    key: str
    container: Container


class Publisher(Steps):
    """Follows the weights of one rank from version to version.

    Every method is collective, but upload() and those that the optimiser calls.
    """

    def __init__(
        self,
        policy: Policy,
        ranks: Ranks,
        *,
        store: Store,
        settings: Weights,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = policy
        self._ranks = ranks
        self._store = store
        self._settings = settings
        self._tracker = Tracker()
        self._link = Link()
        self._clock = clock
        self._share: Share | None = None
        """Created on first use: a run that never publishes does not pay for it."""
        self._digests: list[Digest] | None = None
        """Of each part, in the version that changes are counted from; None before the first."""
        self._changes: Changes = {}
        """Between that version and when the tracker was last armed."""
        self._sent: _Sent | None = None
        self._waiting: dict[VersionId, _Waiting] = {}
        """Changed by atomic operations only: an upload runs during the steps."""

    @property
    def is_following(self) -> bool:
        """True while changes are tracked; false before the first version."""
        return self._tracker.is_armed

    @override
    def wants(self, name: str) -> bool:
        return self._tracker.wants(name.removeprefix(_PREFIX))

    @override
    @contextmanager
    def watching(self, name: str, parameter: Tensor) -> Iterator[None]:
        source = name.removeprefix(_PREFIX)
        share = self._own()
        before = share.bits(parameter, copy=True)
        yield
        self._tracker.record(source, before, share.bits(parameter))

    def follow(self) -> None:
        """Track changes from the current weights on."""
        self.forget()
        if self._is_delta:
            self._digests = self._own().scan()
            self._tracker.rearm()

    def forget(self) -> None:
        """Drop the base after the weights were replaced: the next version is complete."""
        self._tracker.disarm()
        self._digests, self._changes, self._sent = None, {}, None

    def encode(self, version: VersionId, base: Base | None) -> Receipt:
        """Encode this rank's part of the current weights for upload.

        Args:
            version: a new one, or the last one again.
            base: the version to build on, which need not be published yet; ignored unless the
                weights descend from it. None starts a chain, and drops payloads that wait for
                their upload.

        Raises:
            NonFiniteWeightsError: nothing was encoded.
            PeerFailedError: another rank could not pack its part.
            SchemaChangedError: nothing was encoded.
            StoreError: the store failed; encode again.
            WrongStateError: too many versions wait for their upload.
        """
        schema = self._own().schema
        if base is not None and base.schema_sha256 != schema.sha256:
            raise SchemaChangedError(self._what_changed(base))
        ref = None if base is None else base.ref
        sent = self._sent
        if sent is not None and (sent.version, sent.base) == (version, ref):
            return sent.receipt
        if ref is None:
            self._waiting.clear()
        if len(self._waiting) > self._settings.advanced.backlog:
            raise WrongStateError(f"version {version}: {len(self._waiting)} others wait for upload")
        packed = self._packed(version, ref)
        receipt = self._receipt(version, packed)
        if packed.container is not None and receipt.payload is not None:
            self._waiting[version] = _Waiting(receipt.payload.key, packed.container)
        self._sent = _Sent(version, ref, packed.digests, receipt)
        return receipt

    def upload(self, version: VersionId) -> None:
        """Store this rank's part of an encoded version; idempotent.

        Not collective, and independent of the weights: it may run during a step.

        Raises:
            StoreError: the store failed; upload again.
        """
        if self._ranks.is_first:
            schema = self._own().schema
            publication.put_schema(self._store, schema.to_bytes(), schema.sha256)
        waiting = self._waiting.get(version)
        if waiting is not None:
            began_s = self._clock()
            self._store.put(waiting.key, waiting.container.data)
            self._link.uploaded(waiting.container.size, self._clock() - began_s)
            self._waiting.pop(version, None)

    def _packed(self, version: VersionId, base: VersionRef | None) -> Packed:
        before = self._count_from(base)
        # Ranks agree before a byte leaves any of them.
        _, kept = self._together(self._take_in, int)
        if not kept:
            before = None
        codec = self._link.codec(self._settings.advanced.codec)
        packed, nonfinite = self._together(
            lambda: self._own().packed(before, self._changes, codec=codec),
            lambda done: done.stats.nonfinite,
        )
        if nonfinite and not self._settings.advanced.allow_non_finite:
            raise NonFiniteWeightsError(
                f"version {version} is not published: {nonfinite} weights are NaN or infinite"
            )
        return packed

    def _take_in(self) -> bool:
        """Collect the changes; True if anything of the base is left in this rank's part."""
        if self._is_delta:
            sizes = self._own().sizes
            self._changes = joined(self._changes, self._tracker.rearm(), elements=sizes)
        return not self._own().is_replaced(self._changes)

    def _together(self, work: Callable[[], T], counted: Callable[[T], int]) -> tuple[T, int]:
        """Run each rank's own work; return its result and the sum of a count over all ranks.

        A rank that fails takes part in the count too: otherwise its peers would wait for it until
        the collective times out.

        Raises:
            PeerFailedError: another rank failed.
        """
        done, error = None, None
        try:
            done = work()
        except Exception as caught:  # noqa: BLE001 - raised below, once the peers know
            error = caught
        own = [int(error is not None), 0 if done is None else counted(done)]
        failed, count = self._ranks.total(torch.tensor(own)).tolist()
        if failed:
            # Changes may be lost: on every rank the next version needs nothing of an earlier one.
            self.forget()
        if error is not None:
            raise error
        if done is None or failed:
            raise PeerFailedError(f"{failed} other ranks could not pack their part of a version")
        return done, count

    def _count_from(self, base: VersionRef | None) -> list[Digest] | None:
        """Count changes from a version on, which may be the one that was encoded last.

        Returns:
            Digest of each part in it; None if the changes since are unknown.
        """
        if base is None or not self._is_delta:
            return None
        if self._sent is not None and self._is_state(self._sent.digests, base):
            self._digests, self._changes, self._sent = self._sent.digests, {}, None
        elif self._digests is None or not self._is_state(self._digests, base):
            return None
        return self._digests

    def _is_state(self, digests: list[Digest], base: VersionRef) -> bool:
        own = combined(digests)
        # Sums of 64-bit integers wrap around, as those of the digest do.
        lanes = torch.tensor([_signed(own.a), _signed(own.b)], dtype=torch.int64)
        wanted = Digest.parse(base.state)
        return self._ranks.total(lanes).tolist() == [_signed(wanted.a), _signed(wanted.b)]

    def _receipt(self, version: VersionId, packed: Packed) -> Receipt:
        rank = self._ranks.rank
        payload = None
        if packed.container is not None:
            complete = packed.is_complete
            payload = payload_of(version, rank, packed.container, complete=complete)
        share = combined(packed.digests)
        return Receipt(
            rank=rank,
            payload=payload,
            is_complete=packed.is_complete,
            schema_sha256=self._own().schema.sha256,
            change=packed.change.hex(),
            share=share.hex(),
            stats=packed.stats,
        )

    def _what_changed(self, base: Base) -> str:
        where = f"schema {base.schema_sha256}"
        data = publication.read_schema_bytes(self._store, base.schema_sha256)
        old = parse_schema(data, sha256=base.schema_sha256, where=where)
        return difference(old, self._own().schema)

    def _own(self) -> Share:
        if self._share is None:
            self._share = Share(self._policy, self._ranks, settings=self._settings)
        return self._share

    @property
    def _is_delta(self) -> bool:
        return self._settings.encoding != "Full"


def _signed(lane: int) -> int:
    return lane - (1 << 64) if lane >= 1 << 63 else lane
