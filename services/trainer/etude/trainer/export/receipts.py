"""Receipts of the learner ranks for an encoded version, and the manifest that they add up to."""

from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

from pydantic import BaseModel, Field

from etude.common.errors import EtudeError, Problem, UserError, WrongStateError
from etude.common.weights.coding.container import Container
from etude.common.weights.protocol import records
from etude.common.weights.protocol.manifest import (
    PayloadObject,
    Sha256,
    State,
    Stats,
    VersionRef,
    WeightManifest,
    payload_sha16,
)
from etude.common.weights.protocol.versions import VersionId, delta_key
from etude.common.weights.tensors.digest import ZERO, Digest


class NonFiniteWeightsError(EtudeError):
    """The new weights hold NaN or infinity; nothing was uploaded."""

    reason: ClassVar[str] = "NonFiniteWeights"


class PeerFailedError(EtudeError):
    """Another rank could not do its part of a collective call, and raises why; nothing changed."""

    reason: ClassVar[str] = "PeerFailed"


class SchemaChangedError(UserError):
    """The model differs from the one of the run's earlier versions."""

    reason: ClassVar[str] = "SchemaChanged"

    def __init__(self, what: str) -> None:
        super().__init__(
            Problem(
                reason=self.reason,
                what=f"the policy's tensors differ from those of its earlier versions: {what}",
                where="model.uri, weights.dtype, weights.advanced.tileGrid",
                fix="restore the earlier value, or start a run with another storage.uri",
            )
        )


class PublishBase(NamedTuple):
    """The version that a new one may build on."""

    ref: VersionRef
    schema_sha256: str


class RankReceipt(BaseModel):
    """Summary of one rank's encoded part of a version; at most 1 KB of JSON."""

    model_config = records.STRICT

    rank: int = Field(ge=0)
    payload: PayloadObject | None
    """None if nothing of this rank changed."""
    is_complete: bool
    """True if the version needs no base; all ranks agree."""
    schema_sha256: Sha256
    change: State
    """Digest of the changes since the base; of everything if complete."""
    share: State
    """Digest of the current elements that this rank publishes."""
    coverage: State
    """Digest of the bounds of these elements; zero over all ranks if each has one publisher."""
    stats: Stats


def payload_object(
    version: VersionId, rank: int, container: Container, *, complete: bool
) -> PayloadObject:
    """Describe a container for the manifest; it need not be stored yet."""
    sha16 = payload_sha16(container.data)
    return PayloadObject(
        rank=rank,
        key=delta_key(version, rank, sha16, complete=complete),
        size=container.size,
        index_offset=container.index_offset,
        index_length=container.index_length,
        index_sha256=container.index_sha256,
    )


def build_manifest(
    receipts: Sequence[RankReceipt],
    *,
    run: str,
    version: VersionId,
    step: int,
    holder: str,
    base: VersionRef | None,
) -> WeightManifest:
    """Build the manifest of a version whose payloads are encoded.

    Raises:
        WrongStateError: the receipts belong to different versions, or do not add up.
    """
    first = receipts[0]
    if [each.rank for each in receipts] != list(range(len(receipts))):
        raise WrongStateError(f"version {version}: receipts of {[r.rank for r in receipts]}")
    for each in receipts:
        if (each.schema_sha256, each.is_complete) != (first.schema_sha256, first.is_complete):
            raise WrongStateError(f"version {version}: rank {each.rank} disagrees with rank 0")
    if sum_digests(Digest.parse(each.coverage) for each in receipts) != ZERO:
        raise WrongStateError(f"version {version}: the ranks' parts overlap, or some are missing")
    if not first.is_complete and base is None:
        raise WrongStateError(f"version {version}: a delta without a base")
    built_on = None if first.is_complete else base
    before = ZERO if built_on is None else Digest.parse(built_on.state)
    state = before.plus(sum_digests(Digest.parse(each.change) for each in receipts))
    if state != (share := sum_digests(Digest.parse(each.share) for each in receipts)):
        raise WrongStateError(
            f"version {version}: the changes lead to state {state.hex()}, the weights are in"
            f" {share.hex()}"
        )
    return WeightManifest(
        run=run,
        epoch=version.epoch,
        number=version.number,
        step=step,
        holder=holder,
        base=built_on,
        schema_sha256=first.schema_sha256,
        state=state.hex(),
        objects=tuple(each.payload for each in receipts if each.payload is not None),
        stats=sum_stats([each.stats for each in receipts]),
    )


def sum_digests(digests: Iterable[Digest]) -> Digest:
    """Sum of digests."""
    state = ZERO
    for each in digests:
        state = state.plus(each)
    return state


def sum_stats(stats: Sequence[Stats]) -> Stats:
    """Sum of the statistics of several ranks."""
    codecs: dict[str, int] = {}
    for each in stats:
        for name, count in each.codecs.items():
            codecs[name] = codecs.get(name, 0) + count
    return Stats(
        changed=sum(each.changed for each in stats),
        elements=sum(each.elements for each in stats),
        one_ulp=sum(each.one_ulp for each in stats),
        nonfinite=sum(each.nonfinite for each in stats),
        codecs=dict(sorted(codecs.items())),
        num_bytes=sum(each.num_bytes for each in stats),
    )
