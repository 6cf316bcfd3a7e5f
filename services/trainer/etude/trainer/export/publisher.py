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
from etude.trainer.export.change_tracker import Changes, ChangeTracker, merge_changes
from etude.trainer.export.codec_choice import UplinkMeter
from etude.trainer.export.receipts import (
    NonFiniteWeightsError,
    PeerFailedError,
    PublishBase,
    RankReceipt,
    SchemaChangedError,
    payload_object,
    sum_digests,
)
from etude.trainer.export.shard_packer import PackedShard, ShardPacker
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.parameters import StepObserver
from etude.trainer.model.policy import Policy
from etude.trainer.model.weight_digest import total_digest

T = TypeVar("T")

_PREFIX = "model."
"""Of a policy's parameters before the model's own names."""


class _LastEncoded(NamedTuple):
    """The newest encoded version of this rank, perhaps not published yet."""

    version: VersionId
    base: VersionRef | None
    digests: list[Digest]
    """Of each part, in this version."""
    receipt: RankReceipt


class _Waiting(NamedTuple):
    """An encoded payload that is not stored yet."""

    key: str
    container: Container


class Publisher(StepObserver):
    """Follows the weights of one rank from version to version.

    Every method is collective, but upload() and those that the optimiser calls.
    """

    def __init__(
        self,
        policy: Policy,
        ranks: RankGroup,
        *,
        store: Store,
        settings: Weights,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = policy
        self._ranks = ranks
        self._store = store
        self._settings = settings
        self._tracker = ChangeTracker()
        self._link = UplinkMeter()
        self._clock = clock
        self._share: ShardPacker | None = None
        """Created on first use: a run that never publishes does not pay for it."""
        self._digests: list[Digest] | None = None
        """Of each part, in the version that changes are counted from; None before the first."""
        self._changes: Changes = {}
        """Between that version and when the tracker was last armed."""
        self._last_encoded: _LastEncoded | None = None
        self._waiting: dict[VersionId, _Waiting] = {}
        """Changed by atomic operations only: an upload runs during the steps."""

    @property
    def is_following(self) -> bool:
        """True while changes are tracked; false before the first version."""
        return self._tracker.is_armed

    @override
    def wants(self, name: str) -> bool:
        # Adapters are no part of a version: the weights that they are merged with are.
        return name.startswith(_PREFIX) and self._tracker.wants(name.removeprefix(_PREFIX))

    @override
    @contextmanager
    def observe_step(self, name: str, parameter: Tensor) -> Iterator[None]:
        source = name.removeprefix(_PREFIX)
        share = self._get_packer()
        before = share.raw_bits(parameter, copy=True)
        yield
        self._tracker.record(source, before, share.raw_bits(parameter))

    def follow_changes(self) -> None:
        """Track changes from the current weights on."""
        self.forget_base()
        if self._is_delta:
            self._digests = self._get_packer().part_digests()
            self._tracker.take_changes()

    def forget_base(self) -> None:
        """Drop the base after the weights were replaced: the next version is complete."""
        self._tracker.disarm()
        self._digests, self._changes, self._last_encoded = None, {}, None

    def encode(self, version: VersionId, base: PublishBase | None) -> RankReceipt:
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
        schema = self._get_packer().schema
        if base is not None and base.schema_sha256 != schema.sha256:
            raise SchemaChangedError(self._describe_schema_change(base))
        ref = None if base is None else base.ref
        sent = self._last_encoded
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
        self._last_encoded = _LastEncoded(version, ref, packed.digests, receipt)
        return receipt

    def upload(self, version: VersionId) -> None:
        """Store this rank's part of an encoded version; idempotent.

        Not collective, and independent of the weights: it may run during a step.

        Raises:
            StoreError: the store failed; upload again.
        """
        if self._ranks.is_first:
            schema = self._get_packer().schema
            publication.put_schema(self._store, schema.to_bytes(), schema.sha256)
        waiting = self._waiting.get(version)
        if waiting is not None:
            began_s = self._clock()
            self._store.put(waiting.key, waiting.container.data)
            self._link.record_upload(waiting.container.size, self._clock() - began_s)
            self._waiting.pop(version, None)

    def _packed(self, version: VersionId, base: VersionRef | None) -> PackedShard:
        before = self._base_digests(base)
        # Ranks agree before a byte leaves any of them.
        _, kept = self._run_on_all_ranks(self._collect_changes, int)
        if not kept:
            before = None
        codec = self._link.choose_codec(self._settings.advanced.codec)
        packed, nonfinite = self._run_on_all_ranks(
            lambda: self._get_packer().pack(before, self._changes, codec=codec),
            lambda done: done.stats.nonfinite,
        )
        if nonfinite and not self._settings.advanced.allow_non_finite:
            raise NonFiniteWeightsError(
                f"version {version} is not published: {nonfinite} weights are NaN or infinite"
            )
        return packed

    def _collect_changes(self) -> bool:
        """Collect the changes; True if anything of the base is left in this rank's part."""
        if self._is_delta:
            sizes = self._get_packer().sizes
            self._changes = merge_changes(
                self._changes, self._tracker.take_changes(), elements=sizes
            )
        return not self._get_packer().is_replaced(self._changes)

    def _run_on_all_ranks(
        self, work: Callable[[], T], counted: Callable[[T], int]
    ) -> tuple[T, int]:
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
            self.forget_base()
        if error is not None:
            raise error
        if done is None or failed:
            raise PeerFailedError(f"{failed} other ranks could not pack their part of a version")
        return done, count

    def _base_digests(self, base: VersionRef | None) -> list[Digest] | None:
        """Count changes from a version on, which may be the one that was encoded last.

        Returns:
            Digest of each part in it; None if the changes since are unknown.
        """
        if base is None or not self._is_delta:
            return None
        if self._last_encoded is not None and self._is_state(self._last_encoded.digests, base):
            self._digests, self._changes, self._last_encoded = self._last_encoded.digests, {}, None
        elif self._digests is None or not self._is_state(self._digests, base):
            return None
        return self._digests

    def _is_state(self, digests: list[Digest], base: VersionRef) -> bool:
        return total_digest(sum_digests(digests), self._ranks) == Digest.parse(base.state)

    def _receipt(self, version: VersionId, packed: PackedShard) -> RankReceipt:
        rank = self._ranks.rank
        payload = None
        if packed.container is not None:
            complete = packed.is_complete
            payload = payload_object(version, rank, packed.container, complete=complete)
        share = sum_digests(packed.digests)
        return RankReceipt(
            rank=rank,
            payload=payload,
            is_complete=packed.is_complete,
            schema_sha256=self._get_packer().schema.sha256,
            change=packed.change.hex(),
            share=share.hex(),
            coverage=self._get_packer().coverage.hex(),
            stats=packed.stats,
        )

    def _describe_schema_change(self, base: PublishBase) -> str:
        where = f"schema {base.schema_sha256}"
        data = publication.read_schema_bytes(self._store, base.schema_sha256)
        old = parse_schema(data, sha256=base.schema_sha256, where=where)
        return difference(old, self._get_packer().schema)

    def _get_packer(self) -> ShardPacker:
        if self._share is None:
            self._share = ShardPacker(self._policy, self._ranks, settings=self._settings)
        return self._share

    @property
    def _is_delta(self) -> bool:
        return self._settings.encoding != "Full"
