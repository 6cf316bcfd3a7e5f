"""The cheapest way from what is live to a version."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from etude.common import weights
from etude.common.blobs import MemoryStore, MissingError
from etude.common.errors import CorruptError, FencedError
from etude.common.weights import Edge, VersionId, VersionRef
from etude.common.weights.protocol.plan import CandidateStep, Kind, cheapest

V = [VersionId(1, number) for number in range(600)]
KINDS: list[Kind] = ["delta", "skip", "keyframe"]


def kinds(edges: list[Edge]) -> list[str]:
    return [edge.kind for edge in edges]


def test_a_replica_without_weights_begins_with_a_complete_version(
    line: Any, store: MemoryStore
) -> None:
    line.open()
    line.many(3)
    edges = weights.plan_path(store, None, V[2])
    assert kinds(edges) == ["complete", "delta", "delta"]
    assert line.applied(None, edges) == line.models[V[2]]


def test_a_replica_one_behind_takes_one_delta(line: Any, store: MemoryStore) -> None:
    line.open()
    line.many(3)
    [edge] = weights.plan_path(store, line.manifests[V[1]].ref, V[2])
    assert edge.base == line.manifests[V[1]].ref
    assert edge.target == line.manifests[V[2]].ref
    assert edge.objects == line.manifests[V[2]].objects
    assert weights.plan_path(store, line.manifests[V[2]].ref, V[2]) == []


def test_a_keyframe_is_taken_where_it_is_cheaper_than_the_chain(
    line: Any, store: MemoryStore
) -> None:
    line.open()
    line.many(8, pad=200)
    line.keyframe(V[5], pad=900)
    assert kinds(weights.plan_path(store, line.manifests[V[4]].ref, V[7])) == ["delta"] * 3
    assert kinds(weights.plan_path(store, None, V[7])) == ["keyframe", "delta", "delta"]
    edges = weights.plan_path(store, line.manifests[V[0]].ref, V[7])
    assert kinds(edges) == ["keyframe", "delta", "delta"]
    assert line.applied(line.manifests[V[0]].ref, edges) == line.models[V[7]]


def test_a_replica_that_is_far_behind_reads_few_objects(store: MemoryStore, line: Any) -> None:
    line.open()
    line.many(600, pad=20)
    for stride in (8, 64):
        for base, target in zip(V[::stride], V[stride::stride], strict=False):
            line.skip(base, target, pad=20)
    store.__class__ = Counting
    Counting.calls.clear()
    edges = weights.plan_path(store, line.manifests[V[3]].ref, V[599])
    # 5 deltas to 8, 7 skips to 64, 8 long skips to 576, 2 skips to 592, 7 deltas.
    assert kinds(edges) == ["delta"] * 5 + ["skip"] * 17 + ["delta"] * 7
    assert len([call for call in Counting.calls if call[0] == "list"]) <= 10
    assert len([call for call in Counting.calls if call[0] == "get"]) < 29 + 17 + 5
    assert line.applied(line.manifests[V[3]].ref, edges) == line.models[V[599]]


class Counting(MemoryStore):
    """Writes down each call."""

    calls: list[tuple[str, str]] = []  # noqa: RUF012 - the store of one test

    @override
    def get(self, key: str) -> bytes:
        self.calls.append(("get", key))
        return MemoryStore.get(self, key)

    @override
    def list(self, prefix: str, after: str = "") -> Any:
        self.calls.append(("list", prefix))
        return MemoryStore.list(self, prefix, after)


@given(st.data())
def test_no_way_is_cheaper_than_the_plan(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6))
    chain = V[:count]
    bases = [None, *chain]
    drawn = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from(KINDS),
                st.sampled_from(bases),
                st.sampled_from(V[: count + 1]),
                st.integers(0, 9),
            ),
            max_size=14,
        )
    )
    steps = [CandidateStep(kind, base, target, size) for kind, base, target, size in drawn]
    start = data.draw(st.sampled_from(bases))
    found = cheapest(chain, steps, start)
    expected = _brute_force(chain, steps, start)
    if math.isinf(expected):
        assert found is None
        return
    assert found is not None
    assert sum(step.num_bytes for step in found) == expected
    at = start
    for step in found:
        assert step.base in {None, at}
        at = step.target
    assert at == chain[-1]


def _brute_force(
    chain: list[VersionId], steps: list[CandidateStep], start: VersionId | None
) -> float:
    """Relaxes every step until nothing changes."""
    cost: dict[VersionId | None, float] = {None: 0, start: 0}
    for _ in range(len(chain) + 1):
        for base, target, size in ((s.base, s.target, s.num_bytes) for s in steps):
            if target in chain and (base is None or base < target):
                cost[target] = min(cost.get(target, math.inf), cost.get(base, math.inf) + size)
    return cost.get(chain[-1], math.inf)


@given(st.data())
def test_every_plan_of_a_real_line_gives_the_published_weights(data: st.DataObject) -> None:
    line = _line_of(data)
    live = data.draw(st.sampled_from([None, *line.models]))
    target = data.draw(st.sampled_from(weights.accepted_chain(line.store)))
    ref = None if live is None else line.manifests[live].ref
    edges = weights.plan_path(line.store, ref, target)
    assert line.applied(ref, edges) == line.models[target]


MAKE_LINE: list[Any] = []


@pytest.fixture(autouse=True)
def _remember_line(line: Any) -> None:
    MAKE_LINE[:] = [type(line)]


def _line_of(data: st.DataObject) -> Any:
    """Two epochs, complete versions, skips and keyframes anywhere."""
    line = MAKE_LINE[0](MemoryStore())
    line.open()
    values = st.tuples(*[st.integers(0, 2)] * 3)
    last: VersionId | None = None
    turn = data.draw(st.integers(1, 4))
    for number in range(data.draw(st.integers(turn + 1, 8))):
        if number == turn:
            last = data.draw(st.sampled_from(list(line.models)))
            line.open(last, "rollback")
        version = VersionId(1 if number < turn else 2, number)
        base = last if last is not None and data.draw(st.integers(0, 3)) else None
        line.publish(version, data.draw(values), base=base, pad=data.draw(st.integers(0, 30)))
        last = version
    for _ in range(data.draw(st.integers(0, 4))):
        a, b = sorted(
            data.draw(st.lists(st.sampled_from(list(line.models)), min_size=2, max_size=2)),
            key=lambda version: version.number,
        )
        pad = data.draw(st.integers(0, 30))
        line.keyframe(a, pad=pad) if a == b else line.skip(a, b, pad=pad)
    return line


def test_dead_versions_and_what_leads_over_them_are_not_used(line: Any, store: MemoryStore) -> None:
    line.open()
    line.many(6)
    line.skip(V[1], V[4])
    line.keyframe(V[5], pad=0)
    line.open(V[2], "rollback")
    line.publish(VersionId(2, 6), (7, 7, 7), base=V[2])
    edges = weights.plan_path(store, line.manifests[V[1]].ref, VersionId(2, 6))
    assert [edge.target.version for edge in edges] == [V[2], VersionId(2, 6)]
    with pytest.raises(FencedError, match="accepted chain"):
        weights.plan_path(store, None, V[4])
    # Whoever served a dead version begins anew.
    edges = weights.plan_path(store, line.manifests[V[5]].ref, VersionId(2, 6))
    assert kinds(edges) == ["complete", "delta", "delta", "delta"]


def test_a_resume_that_repeats_the_same_steps_moves_no_bytes(line: Any, store: MemoryStore) -> None:
    line.open()
    line.many(4)
    line.open(V[1], "takeover")
    line.publish(VersionId(2, 4), line.models[V[2]], base=V[1])
    line.publish(VersionId(2, 5), line.models[V[3]], base=VersionId(2, 4))
    live = line.manifests[V[3]].ref
    assert weights.plan_path(store, live, VersionId(2, 5)) == []
    line.publish(VersionId(2, 6), (8, 8, 8), base=VersionId(2, 5))
    [edge] = weights.plan_path(store, live, VersionId(2, 6))
    assert edge.base is not None
    assert edge.base.state == live.state
    assert line.applied(live, [edge]) == (8, 8, 8)


def test_an_older_target_is_reached_from_what_lies_before_it(line: Any, store: MemoryStore) -> None:
    line.open()
    line.many(5)
    edges = weights.plan_path(store, line.manifests[V[4]].ref, V[2])
    assert kinds(edges) == ["complete", "delta", "delta"]


@pytest.mark.parametrize("damage", ["record", "part", "torn", "manifest"])
def test_what_is_damaged_or_missing_is_gone_around(
    line: Any, store: MemoryStore, damage: str
) -> None:
    line.open()
    line.many(6, pad=300)
    skip = line.skip(V[1], V[4])
    if damage == "record":
        store.objects[skip.key] = store.objects[skip.key][:-1]
    elif damage == "part":
        del store.objects[skip.objects[0].key]
    elif damage == "torn":
        store.objects[skip.objects[0].key] += b"0"
    else:
        store.objects[V[4].manifest_key] = b"{}"
        line.skip(V[1], V[5], pad=10)
    edges = weights.plan_path(store, line.manifests[V[1]].ref, V[5])
    assert kinds(edges) == (["skip"] if damage == "manifest" else ["delta"] * 4)


def test_a_live_version_that_is_not_what_was_published_is_not_built_upon(
    line: Any, store: MemoryStore
) -> None:
    line.open()
    line.many(4)
    for change in ({"state": "0" * 32}, {"manifest_sha256": "0" * 64}):
        live: VersionRef = line.manifests[V[2]].ref.model_copy(update=change)
        assert kinds(weights.plan_path(store, live, V[3]))[0] == "complete"
    live = line.manifests[V[3]].ref.model_copy(update={"state": "0" * 32})
    assert kinds(weights.plan_path(store, live, V[3]))[0] == "complete"


def test_a_manifest_whose_base_was_replaced_breaks_the_chain(line: Any, store: MemoryStore) -> None:
    line.open()
    line.many(3)
    forged = line.manifests[V[1]].model_copy(update={"holder": "someone"})
    store.objects[V[1].manifest_key] = forged.to_bytes()
    with pytest.raises(CorruptError, match=r"builds on another 1\.1|builds on another"):
        weights.plan_path(store, None, V[2])


def test_a_damaged_target_is_corrupt_and_an_unknown_one_missing(
    line: Any, store: MemoryStore
) -> None:
    line.open()
    line.many(3)
    with pytest.raises(MissingError):
        weights.plan_path(store, None, V[9])
    store.objects[V[2].manifest_key] = b"{}"
    with pytest.raises(CorruptError):
        weights.plan_path(store, None, V[2])


def test_without_any_way_the_missing_object_is_named(line: Any, store: MemoryStore) -> None:
    line.open()
    line.many(3)
    del store.objects[line.manifests[V[0]].objects[0].key]
    with pytest.raises(MissingError):
        weights.plan_path(store, None, V[2])
    assert not weights.is_reachable(store, V[2])
    assert kinds(weights.plan_path(store, line.manifests[V[1]].ref, V[2])) == ["delta"]


def test_what_is_about_to_be_deleted_is_gone_around(line: Any, store: MemoryStore) -> None:
    line.open()
    line.many(6, pad=300)
    skip = line.skip(V[1], V[4])
    live = line.manifests[V[1]].ref
    assert kinds(weights.plan_path(store, live, V[5])) == ["skip", "delta"]
    for key in (skip.key, skip.objects[0].key):
        assert kinds(weights.plan_path(store, live, V[5], avoid={key})) == ["delta"] * 4
    doomed = line.manifests[V[3]].objects[0].key
    assert kinds(weights.plan_path(store, live, V[5], avoid={doomed})) == ["skip", "delta"]
    with pytest.raises(MissingError):
        weights.plan_path(store, live, V[5], avoid={V[5].manifest_key})


def test_payloads_that_the_manifest_does_not_name_do_no_harm(line: Any, store: MemoryStore) -> None:
    line.open()
    line.many(3)
    weights.publish_payload(store, V[1], 7, b"of a try that was given up" * 100)
    edges = weights.plan_path(store, line.manifests[V[0]].ref, V[2])
    assert line.applied(line.manifests[V[0]].ref, edges) == line.models[V[2]]


def test_a_version_without_changes_costs_nothing(line: Any, store: MemoryStore) -> None:
    line.open()
    line.many(2)
    line.publish(V[2], line.models[V[1]], base=V[1], objects=())
    line.publish(V[3], (5, 5, 5), base=V[2])
    edges = weights.plan_path(store, line.manifests[V[0]].ref, V[3])
    assert [edge.num_bytes > 0 for edge in edges] == [True, False, True]
    assert line.applied(line.manifests[V[0]].ref, edges) == (5, 5, 5)
