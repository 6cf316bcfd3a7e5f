"""Roots of the collector: checkpoints, readers and channels keep the way to what they need."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common import weights
from etude.common.blobs import MemoryStore
from etude.common.weights import GarbageCollector, Retention, VersionId
from etude.common.weights.protocol.chain_view import take_lineage_view
from etude.common.weights.protocol.garbage_collector import take_inventory
from etude.common.weights.protocol.retention import (
    Roots,
    deletable_keys,
    plan_retention,
    required_keys,
)

V = [VersionId(1, number) for number in range(40)]


def test_of_a_served_version_only_what_leads_to_it_stays(line: Any, store: MemoryStore) -> None:
    line.open()
    line.many(12)
    for number in (1, 4, 10):
        line.keyframe(V[number])
    ours = GarbageCollector(
        store=store,
        epoch=1,
        resumable=frozenset,
        served=lambda: [V[5]],
        retention=Retention(versions=1, keyframes=1),
    )
    ours.collect()
    assert weights.accepted_chain(store) == [*V[4:6], *V[10:12]]
    assert line.applied(None, weights.plan_path(store, None, V[5])) == line.models[V[5]]
    live = line.manifests[V[5]].ref
    assert line.applied(live, weights.plan_path(store, live, V[11])) == line.models[V[11]]
    ours.served = frozenset
    ours.collect()
    assert weights.accepted_chain(store) == V[10:12]


MAKE_LINE: list[Any] = []


@pytest.fixture(autouse=True)
def _remember_line(line: Any) -> None:
    MAKE_LINE[:] = [type(line)]


@given(st.data())
def test_whoever_the_roots_are_nobody_among_them_loses_its_way(data: st.DataObject) -> None:
    line = MAKE_LINE[0](MemoryStore())
    line.open()
    count = data.draw(st.integers(2, 10))
    line.many(count)
    picks = st.lists(st.sampled_from(V[:count]), max_size=3, unique=True)
    for version in data.draw(picks):
        line.keyframe(version, pad=data.draw(st.integers(0, 50)))
    if data.draw(st.booleans()):
        parent = data.draw(st.sampled_from(V[:count]))
        line.open(parent, "rollback")
        line.publish(VersionId(2, count), (9, 9, 9), base=parent)
    leased, resumable = frozenset(data.draw(picks)), frozenset(data.draw(picks))
    served = frozenset(data.draw(picks))
    chain = weights.accepted_chain(line.store)
    store = line.store
    epoch = 2 if chain[-1].epoch == 2 else 1
    roots = Roots(leased=leased, resumable=resumable, served=served)
    inventory = take_inventory(store, epoch, roots)
    stays = plan_retention(inventory, roots, Retention(versions=1, keyframes=1))
    keys = deletable_keys(inventory, stays)
    assert len(keys) == len(set(keys))
    assert required_keys(inventory, stays).isdisjoint(keys)
    store.delete(keys)
    for version in leased & set(chain):
        edges = weights.plan_path(store, line.manifests[version].ref, chain[-1])
        assert line.applied(line.manifests[version].ref, edges) == line.models[chain[-1]]
    for version in {chain[-1], *resumable & set(chain)}:
        assert line.applied(None, weights.plan_path(store, None, version)) == line.models[version]
    for version in served:
        view = take_lineage_view(store, version)
        edges = weights.plan_path(store, None, version, view=view)
        assert line.applied(None, edges) == line.models[version]
    for version in sorted(resumable - set(chain))[:1]:
        line.open(version, "rollback")
        assert weights.read_epoch(store, epoch + 1).parent == version
