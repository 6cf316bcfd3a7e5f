"""Update paths: the objects that bring a replica to a version, at the fewest bytes."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from etude.common.blobs import MissingError, ObjectInfo, Store, StoreRefusedError
from etude.common.errors import CorruptError, EtudeError, FencedError
from etude.common.weights.protocol.chain_view import ChainView, take_view
from etude.common.weights.protocol.folded import Keyframe, Skip, read_keyframe, read_skip
from etude.common.weights.protocol.listing import FoldedObjects, Listing, SkipSpan
from etude.common.weights.protocol.manifest import (
    PayloadObject,
    VersionRef,
    WeightManifest,
    read_manifest,
)
from etude.common.weights.protocol.quarantine import QuarantinedVersionError
from etude.common.weights.protocol.versions import VersionId

Kind = Literal["complete", "delta", "skip", "keyframe"]


class CandidateStep(NamedTuple):
    """One way to reach a version."""

    kind: Kind
    base: VersionId | None
    """None: it can be applied to anything."""
    target: VersionId
    num_bytes: int


def cheapest(
    chain: Sequence[VersionId], steps: Iterable[CandidateStep], start: VersionId | None
) -> list[CandidateStep] | None:
    """Steps from the start, or from nothing, to the last version of the chain.

    Args:
        chain: versions, oldest first; the last one is where to.
        steps: each leads forward along the chain; others are passed over.
        start: where from, besides nothing; on the chain or None.

    Returns:
        The steps with the fewest bytes, of those the fewest steps; empty if the start is the
        target; None if no way leads there.
    """
    place = {version: index for index, version in enumerate(chain)}
    into: dict[VersionId, list[CandidateStep]] = {}
    for step in steps:
        forward = step.base is None or place.get(step.base, len(chain)) < place.get(step.target, -1)
        if forward and step.target in place:
            into.setdefault(step.target, []).append(step)
    best: dict[VersionId | None, tuple[int, int, CandidateStep | None]] = {None: (0, 0, None)}
    if start is not None:
        best[start] = (0, 0, None)
    for version in chain:
        for step in into.get(version, ()):
            before = best.get(step.base)
            if before is None:
                continue
            cost = (before[0] + step.num_bytes, before[1] + 1)
            if version not in best or cost < best[version][:2]:
                best[version] = (*cost, step)
    return _steps_to(best, chain[-1])


def _steps_to(
    best: dict[VersionId | None, tuple[int, int, CandidateStep | None]], target: VersionId
) -> list[CandidateStep] | None:
    if target not in best:
        return None
    steps: list[CandidateStep] = []
    step = best[target][2]
    while step is not None:
        steps.append(step)
        step = best[step.base][2]
    return steps[::-1]


MAX_RELABEL = 64
"""Versions of newer epochs that are looked at for the state that is live already."""


class Edge(NamedTuple):
    """One prepare and commit: a complete version, a delta, a skip or a keyframe."""

    kind: Kind
    base: VersionRef | None
    """What must be live; None: anything."""
    target: VersionRef
    """What is live afterwards."""
    schema_sha256: str
    objects: tuple[PayloadObject, ...]

    @property
    def num_bytes(self) -> int:
        return sum(item.size for item in self.objects)


def plan_path(
    store: Store,
    live: VersionRef | None,
    target: VersionId,
    *,
    avoid: Collection[str] = frozenset(),
    view: ChainView | None = None,
) -> list[Edge]:
    """The cheapest path from the live version to another, each edge checked against its manifest.

    Only manifests and records on the way are read. Damaged, missing and
    unreadable ones are gone around.

    Args:
        store: the run's store.
        live: what the replica has now; None for nothing.
        target: where to; ask is_accepted() afterwards, before serving it.
        avoid: keys that are about to be deleted.
        view: what the store holds, as the caller saw it; unset looks now.

    Returns:
        Edges in order. Empty if the live state is the target's already: then at most the label
        differs, after a resume that repeated the same steps.

    Raises:
        MissingError: the target is not published, or nothing leads to it any more.
        FencedError: the target is not on the accepted chain.
        QuarantinedVersionError: the target is refused for ever.
        CorruptError: the target's manifest is damaged, or the only way leads over damage.
        StoreError: the store failed.
    """
    seen = take_view(store) if view is None else view
    if target in seen.refused:
        raise QuarantinedVersionError(f"version {target} is quarantined")
    if target not in seen.chain:
        if store.head(target.manifest_key) is None:
            raise MissingError(f"{store.url}/{target.manifest_key}: missing")
        raise FencedError(f"version {target} is not on the accepted chain")
    whole = seen.chain[: seen.chain.index(target) + 1]
    usable = [each for each in whole if each not in seen.refused]
    if avoid:
        usable = [each for each in usable if each.manifest_key not in avoid]
    if target not in usable:
        raise MissingError(f"{store.url}/{target.manifest_key}: about to be deleted")
    return _Planner(store, usable, seen.listing, live, frozenset(avoid)).edges(whole)


def is_reachable(store: Store, version: VersionId, *, avoid: Collection[str] = frozenset()) -> bool:
    """Return true if a replica without weights can get to an accepted version.

    Raises:
        StoreError: the store failed.
    """
    try:
        plan_path(store, None, version, avoid=avoid)
    except (MissingError, FencedError, QuarantinedVersionError, CorruptError):
        return False
    return True


@dataclass(slots=True)
class _Planner:
    store: Store
    chain: list[VersionId]
    """Accepted, neither quarantined nor about to be deleted; the last one is where to."""
    listing: Listing
    live: VersionRef | None
    avoid: frozenset[str]
    manifests: dict[VersionId, WeightManifest] = field(default_factory=dict)
    problem: EtudeError | None = None
    """Why the last step that was tried cannot be used."""

    def edges(self, whole: list[VersionId]) -> list[Edge]:
        target = self.chain[-1]
        last = self._manifest(target)
        if self.live is not None and last.state == self.live.state:
            return []
        start = self._start()
        steps = list(self._steps(whole))
        checked: dict[CandidateStep, Edge] = {}
        while True:
            way = cheapest(self.chain, steps, start)
            if way is None:
                raise self.problem or MissingError(f"{self.store.url}: no way to version {target}")
            unknown = [step for step in way if step not in checked]
            if not unknown:
                return [checked[step] for step in way]
            for step in unknown:
                edge = self._checked(step)
                if edge is not None:
                    base = None if edge.base is None else edge.base.version
                    exact = CandidateStep(edge.kind, base, edge.target.version, edge.num_bytes)
                    checked[exact] = edge
                    if exact == step:
                        continue
                    steps.append(exact)
                steps.remove(step)

    def _steps(self, whole: list[VersionId]) -> Iterator[CandidateStep]:
        """Every step by its listed size; deltas as if each builds on the version before it."""
        known = set(self.chain)
        for before, version in zip([None, *whole], whole, strict=False):
            infos = self.listing.payloads.get(version, [])
            if version not in known or self._is_doomed(infos):
                continue
            complete = version in self.listing.complete
            if complete or before is not None:
                base = None if complete else before
                yield CandidateStep(
                    "complete" if complete else "delta", base, version, _size(infos)
                )
        for span, skip in self.listing.skips.items():
            if {span.base, span.target} <= known and self._is_usable(skip):
                yield CandidateStep("skip", span.base, span.target, _size(skip.parts))
        for version, keyframe in self.listing.keyframes.items():
            if version in known and self._is_usable(keyframe):
                yield CandidateStep("keyframe", None, version, _size(keyframe.parts))

    def _is_usable(self, folded: FoldedObjects) -> bool:
        return folded.record is not None and not self._is_doomed(folded.objects)

    def _is_doomed(self, infos: list[ObjectInfo]) -> bool:
        return any(info.key in self.avoid for info in infos)

    def _start(self) -> VersionId | None:
        """The version on the chain that has the live state, if one is known to."""
        if self.live is None:
            return None
        if self.live.version in self.chain:
            return self.live.version if self._is_what_was_published(self.live) else None
        # After a resume the same steps may have led to the same weights under newer names.
        newer = [
            each
            for each in self.chain
            if each.epoch > self.live.epoch and each.number > self.live.number
        ]
        for version in reversed(newer[:MAX_RELABEL]):
            try:
                if self._manifest(version).state == self.live.state:
                    return version
            except (MissingError, CorruptError) as error:
                self.problem = error
        return None

    def _is_what_was_published(self, live: VersionRef) -> bool:
        try:
            return self._manifest(live.version).ref == live
        except (MissingError, CorruptError) as error:
            self.problem = error
            return False

    def _manifest(self, version: VersionId) -> WeightManifest:
        if version not in self.manifests:
            self.manifests[version] = read_manifest(self.store, version)
        return self.manifests[version]

    def _checked(self, step: CandidateStep) -> Edge | None:
        """The edge of a candidate step by its records; None if it cannot be used."""
        try:
            edge = self._edge(step)
            self._check(edge)
        except (MissingError, CorruptError, StoreRefusedError) as error:
            self.problem = error
            return None
        return edge

    def _edge(self, step: CandidateStep) -> Edge:
        manifest = self._manifest(step.target)
        if step.kind in {"complete", "delta"}:
            kind: Kind = "complete" if manifest.is_complete else "delta"
            return Edge(kind, manifest.base, manifest.ref, manifest.schema_sha256, manifest.objects)
        record: Skip | Keyframe
        base: VersionRef | None = None
        if step.base is None:
            record = read_keyframe(self.store, step.target)
        else:
            record = read_skip(self.store, step.base, step.target)
            base = record.base
        if record.target != manifest.ref or record.schema_sha256 != manifest.schema_sha256:
            raise CorruptError(f"{self.store.url}/{record.key}: not of this version {step.target}")
        return Edge(step.kind, base, record.target, record.schema_sha256, record.objects)

    def _check(self, edge: Edge) -> None:
        base, target = edge.base, edge.target.version
        if base is not None:
            if base.version not in self.chain:
                raise MissingError(f"{self.store.url}: base {base.version} of {target} is gone")
            if base != self._manifest(base.version).ref:
                raise CorruptError(f"{self.store.url}: {target} builds on another {base.version}")
        listed = {info.key: info.size for info in self._infos(edge)}
        for item in edge.objects:
            size = listed.get(item.key)
            if size is None:
                raise MissingError(f"{self.store.url}/{item.key}: missing")
            if size != item.size:
                raise CorruptError(
                    f"{self.store.url}/{item.key}: {size} bytes, the record says {item.size}"
                )

    def _infos(self, edge: Edge) -> list[ObjectInfo]:
        target = edge.target.version
        if edge.kind == "keyframe":
            return self.listing.keyframes[target].parts
        if edge.kind == "skip" and edge.base is not None:
            return self.listing.skips[SkipSpan(edge.base.version, target)].parts
        return self.listing.payloads.get(target, [])


def _size(infos: list[ObjectInfo]) -> int:
    return sum(info.size for info in infos)


def oldest_needed(edges: list[Edge]) -> VersionRef | None:
    """The oldest version that a plan reads or builds on; None for an empty plan."""
    if not edges:
        return None
    return edges[0].target if edges[0].base is None else edges[0].base
