"""Fencing and the accepted chain, under every interleaving that hypothesis thinks of."""

import struct
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from typing_extensions import override

from etude.common import weights
from etude.common.blobs import MemoryStore, MissingError
from etude.common.errors import CorruptError, FencedError
from etude.common.weights import FullManifest, Tensor, VersionId

Publish = Callable[..., FullManifest]


def test_a_new_epoch_fences_the_publisher_before_it(
    publish: Publish, claim: Callable[..., int], store: MemoryStore
) -> None:
    claim()
    publish(1, 0)
    assert claim(VersionId(1, 0), "takeover") == 2
    with pytest.raises(FencedError, match="epoch 2"):
        publish(1, 1)
    assert weights.newest(store) == VersionId(1, 0)
    publish(2, 1)
    assert weights.accepted_chain(store) == [VersionId(1, 0), VersionId(2, 1)]


def test_versions_above_the_parent_of_a_newer_epoch_are_dead(
    publish: Publish, claim: Callable[..., int], store: MemoryStore
) -> None:
    claim()
    for number in range(4):
        publish(1, number)
    claim(VersionId(1, 1), "rollback")
    assert not weights.is_accepted(store, VersionId(1, 3))
    assert weights.is_accepted(store, VersionId(1, 1))
    assert weights.newest(store) == VersionId(1, 1)
    publish(2, 4)
    assert weights.accepted_chain(store) == [VersionId(1, 0), VersionId(1, 1), VersionId(2, 4)]


def test_numbers_stay_above_dead_and_pruned_ones(
    publish: Publish, claim: Callable[..., int], store: MemoryStore
) -> None:
    claim()
    for number in range(6):
        publish(1, number)
    claim(VersionId(1, 2), "rollback")
    for number in (4, 5):
        del store.objects[VersionId(1, number).manifest_key]
    claim(VersionId(1, 2), "takeover")
    assert weights.read_epoch(store, 3).first_number == 6


def test_a_manifest_that_a_fenced_publisher_creates_late_is_not_accepted(
    publish: Publish, claim: Callable[..., int], store: MemoryStore
) -> None:
    claim()
    publish(1, 0)
    late = publish(1, 1)
    del store.objects[VersionId(1, 1).manifest_key]  # it has not arrived yet
    claim(VersionId(1, 0), "takeover")
    store.objects[VersionId(1, 1).manifest_key] = late.to_bytes()
    assert not weights.is_accepted(store, VersionId(1, 1))
    assert weights.newest(store) == VersionId(1, 0)


def test_a_version_of_an_epoch_that_nobody_opened_is_not_accepted(
    publish: Publish, claim: Callable[..., int], store: MemoryStore
) -> None:
    claim()
    publish(1, 0)
    assert not weights.is_accepted(store, VersionId(7, 0))


def test_a_claim_whose_reply_was_lost_is_recognised() -> None:
    class LostReply(MemoryStore):
        @override
        def create(self, key: str, data: bytes) -> None:
            super().create(key, data)
            super().create(key, data)  # the client's own retry finds the first one

    assert weights.claim_epoch(LostReply(), holder="h", parent=None, reason="start") == 1


def test_a_reason_that_nobody_knows_is_refused(store: MemoryStore) -> None:
    with pytest.raises(ValueError, match="not one of start, takeover, rollback"):
        weights.claim_epoch(store, holder="h", parent=None, reason="because")


def test_pruning_keeps_what_it_is_told_and_everything_newer(
    publish: Publish, claim: Callable[..., int], store: MemoryStore
) -> None:
    claim()
    for number in range(6):
        publish(1, number)
    deleted = weights.prune(store, keep={VersionId(1, 1), VersionId(1, 4)})
    assert weights.accepted_chain(store) == [VersionId(1, 1), VersionId(1, 4), VersionId(1, 5)]
    assert deleted[0] == VersionId(1, 3).manifest_key
    for version in weights.accepted_chain(store):
        assert list(weights.fetch(store, weights.read_full_manifest(store, version)))
    assert len([key for key in store.objects if key.startswith("weights/full/")]) == 3


def test_a_fenced_publisher_prunes_nothing(
    publish: Publish, claim: Callable[..., int], store: MemoryStore
) -> None:
    claim()
    publish(1, 0)
    publish(1, 1)
    claim(VersionId(1, 0), "takeover")
    before = dict(store.objects)
    with pytest.raises(FencedError):
        weights.prune(store, keep={VersionId(1, 1)})
    assert store.objects == before


class Publishers(RuleBasedStateMachine):
    """Two publishers that may sleep at any point, one reader, one collector."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        self.ledger: dict[VersionId, float] = {}
        self.epoch_of = {"a": 0, "b": 0}
        self.delayed: list[tuple[str, bytes]] = []
        self.read: list[VersionId] = []

    @initialize()
    def start(self) -> None:
        self.epoch_of["a"] = weights.claim_epoch(
            self.store, holder="a", parent=None, reason="start"
        )

    @rule(who=st.sampled_from("ab"), back=st.integers(0, 3))
    def take_over(self, who: str, back: int) -> None:
        chain = weights.accepted_chain(self.store)
        parent = chain[max(0, len(chain) - 1 - back)] if chain else None
        self.epoch_of[who] = weights.claim_epoch(
            self.store, holder=who, parent=parent, reason="takeover"
        )

    @precondition(lambda self: max(self.epoch_of.values()) > 0)
    @rule(who=st.sampled_from("ab"), skip=st.integers(0, 2), delay=st.booleans())
    def publish(self, *, who: str, skip: int, delay: bool) -> None:
        epoch = self.epoch_of[who]
        if epoch == 0:
            return
        own = [v.number for v in self.ledger if v.epoch == epoch]
        first = weights.read_epoch(self.store, epoch).first_number
        version = VersionId(epoch, max([first - 1, *own]) + 1 + skip)
        value = float(1000 * epoch + version.number)
        tensor = Tensor(name="w", dtype="F32", shape=(1,), data=struct.pack("<f", value))
        fenced = weights.is_fenced(self.store, epoch)
        try:
            weights.publish(
                self.store, run="r", version=version, step=0, holder=who, tensors=[tensor]
            )
        except FencedError:
            assert fenced
            return
        self.ledger[version] = value
        if delay:  # the create is still on its way when others act
            self.delayed.append(
                (version.manifest_key, self.store.objects.pop(version.manifest_key))
            )

    @rule()
    def deliver(self) -> None:
        for key, data in self.delayed:
            self.store.objects[key] = data
        self.delayed.clear()

    @rule(keep=st.integers(1, 3))
    def collect(self, keep: int) -> None:
        chain = weights.accepted_chain(self.store)
        parents = {weights.read_epoch(self.store, e).parent for e in self.epoch_of.values() if e}
        kept = {*chain[-keep:], *(p for p in parents if p is not None)}
        try:
            weights.prune(self.store, keep=kept)
        except FencedError:
            assert kept

    @rule()
    def follow(self) -> None:
        newest = weights.newest(self.store)
        if newest is None or newest not in weights.accepted_chain(self.store):
            return
        try:
            manifest = weights.read_full_manifest(self.store, newest)
            [fetched] = weights.fetch(self.store, manifest)
        except (MissingError, CorruptError) as error:
            raise AssertionError(f"{newest} was offered and cannot be read") from error
        assert weights.is_accepted(self.store, newest)
        [tensor] = fetched.tensors
        assert struct.unpack("<f", tensor.data)[0] == self.ledger[newest]
        self.read.append(newest)

    @invariant()
    def accepted_numbers_rise(self) -> None:
        numbers = [version.number for version in weights.accepted_chain(self.store)]
        assert numbers == sorted(set(numbers))

    @invariant()
    def only_the_newest_epochs_line_is_accepted(self) -> None:
        chain = set(weights.accepted_chain(self.store))
        for version in self.ledger:
            published = version.manifest_key in self.store.objects
            assert weights.is_accepted(self.store, version) >= (version in chain)
            if published and version not in chain:
                assert not weights.is_accepted(self.store, version)


TestPublishers = Publishers.TestCase
TestPublishers.settings = settings(max_examples=60, stateful_step_count=25)
