"""Fencing and the accepted chain, under every interleaving that hypothesis thinks of."""

import hashlib
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from typing_extensions import override

from etude.common import weights
from etude.common.blobs import MemoryStore
from etude.common.errors import FencedError
from etude.common.weights import PayloadObject, Stats, VersionId, WeightManifest

V = [VersionId(1, number) for number in range(6)]


def test_a_new_epoch_fences_the_publisher_before_it(line: Any, store: MemoryStore) -> None:
    line.open()
    line.publish(V[0], (1, 2, 3))
    assert line.open(V[0], "takeover") == 2
    with pytest.raises(FencedError, match="epoch 2"):
        line.publish(V[1], (1, 2, 4), base=V[0])
    assert weights.newest_version(store) == V[0]
    line.publish(VersionId(2, 1), (1, 2, 5), base=V[0])
    assert weights.accepted_chain(store) == [V[0], VersionId(2, 1)]


def test_versions_above_the_parent_of_a_newer_epoch_are_dead(line: Any, store: MemoryStore) -> None:
    line.open()
    line.many(4)
    line.open(V[1], "rollback")
    assert not weights.is_accepted(store, V[3])
    assert weights.is_accepted(store, V[1])
    assert weights.newest_version(store) == V[1]
    line.publish(VersionId(2, 4), (4, 0, 2), base=V[1])
    assert weights.accepted_chain(store) == [V[0], V[1], VersionId(2, 4)]


def test_numbers_stay_above_dead_and_deleted_ones(line: Any, store: MemoryStore) -> None:
    line.open()
    line.many(6)
    line.open(V[2], "rollback")
    for version in V[4:]:
        del store.objects[version.manifest_key]
    line.open(V[2], "takeover")
    assert weights.read_epoch(store, 3).first_number == 6


def test_a_manifest_that_a_fenced_publisher_creates_late_is_not_accepted(
    line: Any, store: MemoryStore
) -> None:
    line.open()
    line.many(2)
    late = store.objects.pop(V[1].manifest_key)  # it has not arrived yet
    line.open(V[0], "takeover")
    store.objects[V[1].manifest_key] = late
    assert not weights.is_accepted(store, V[1])
    assert weights.newest_version(store) == V[0]


def test_a_version_of_an_epoch_that_nobody_opened_is_not_accepted(
    line: Any, store: MemoryStore
) -> None:
    line.open()
    line.publish(V[0], (1, 2, 3))
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


SCHEMA = hashlib.sha256(b"schema").hexdigest()
STATS = Stats(changed=0, elements=1, one_ulp=0, nonfinite=0, codecs={}, num_bytes=0)


def complete(store: MemoryStore, version: VersionId, holder: str) -> WeightManifest:
    """A manifest whose payload, its own name, is in the store."""
    data = str(version).encode()
    key = weights.publish_payload(store, version, 0, data, complete=True)
    item = PayloadObject(
        rank=0, key=key, size=len(data), index_offset=0, index_length=1, index_sha256="0" * 64
    )
    return WeightManifest(
        run="r",
        epoch=version.epoch,
        number=version.number,
        step=0,
        holder=holder,
        base=None,
        schema_sha256=SCHEMA,
        state=hashlib.blake2b(data, digest_size=16).hexdigest(),
        objects=(item,),
        stats=STATS,
    )


class Publishers(RuleBasedStateMachine):
    """Two publishers that may sleep at any point, also with a create on its way, and a reader."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        weights.put_schema(self.store, b"schema", SCHEMA)
        self.published: set[VersionId] = set()
        self.epoch_of = {"a": 0, "b": 0}
        self.delayed: list[tuple[str, bytes]] = []

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
        own = [v.number for v in self.published if v.epoch == epoch]
        first = weights.read_epoch(self.store, epoch).first_number
        version = VersionId(epoch, max([first - 1, *own]) + 1 + skip)
        fenced = weights.is_fenced(self.store, epoch)
        try:
            weights.publish_manifest(self.store, complete(self.store, version, who))
        except FencedError:
            assert fenced
            return
        assert not fenced
        self.published.add(version)
        if delay:  # the create is still on its way when others act
            self.delayed.append(
                (version.manifest_key, self.store.objects.pop(version.manifest_key))
            )

    @rule()
    def deliver(self) -> None:
        for key, data in self.delayed:
            self.store.objects[key] = data
        self.delayed.clear()

    @rule()
    def follow(self) -> None:
        newest = weights.newest_version(self.store)
        if newest is None:
            return
        manifest = weights.read_manifest(self.store, newest)
        assert weights.is_accepted(self.store, newest)
        assert self.store.get(manifest.objects[0].key) == str(newest).encode()

    @invariant()
    def accepted_numbers_rise(self) -> None:
        numbers = [version.number for version in weights.accepted_chain(self.store)]
        assert numbers == sorted(set(numbers))

    @invariant()
    def only_the_newest_epochs_line_is_accepted(self) -> None:
        chain = set(weights.accepted_chain(self.store))
        for version in self.published:
            published = version.manifest_key in self.store.objects
            assert weights.is_accepted(self.store, version) >= (version in chain)
            if published and version not in chain:
                assert not weights.is_accepted(self.store, version)


TestPublishers = Publishers.TestCase
TestPublishers.settings = settings(max_examples=60, stateful_step_count=25)
