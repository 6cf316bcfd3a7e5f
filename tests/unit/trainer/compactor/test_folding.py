"""First old values: those of the window's beginning, whatever was written how often since."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.weights import VersionId, VersionRef
from etude.common.weights.protocol.plan import Edge
from etude.common.weights.replicas.patches import Patch, PreparedPatches
from etude.common.weights.tensors.digest import ZERO
from etude.common.weights.tensors.schema import Schema, TensorSpec
from etude.common.weights.tensors.words import Words, word_type
from etude.trainer.compactor.folding import FoldWindow, FoldWindows
from etude.trainer.export.tile_grouping import Shard

SCHEMA = Schema(
    grid=1,
    tensors=(
        TensorSpec(name="a", dtype="BF16", shape=(21,), split="rows"),
        TensorSpec(name="b", dtype="F32", shape=(3, 3), split="rows"),
        TensorSpec(name="c", dtype="U8", shape=(0,), split="rows"),
    ),
)
_FOLDERS = itertools.count()


def ref(number: int, *, epoch: int = 1, state: int | None = None) -> VersionRef:
    state = number if state is None else state
    return VersionRef(epoch=epoch, number=number, manifest_sha256="a" * 64, state=f"{state:032x}")


def edge(base: VersionRef, target: VersionRef) -> Edge:
    return Edge("delta", base, target, SCHEMA.sha256, ())


def written(words: dict[str, Words], name: str, places: list[int]) -> PreparedPatches:
    """Add one to some words, as a version would."""
    at = np.array(sorted(places), np.uint32)
    old = words[name][at]
    words[name][at] += words[name].dtype.type(1)
    return PreparedPatches((Patch(name, 0, at, old, words[name][at]),), ZERO, at.size)


def zeros() -> dict[str, Words]:
    return {s.name: np.zeros(s.elements, word_type(s.dtype)) for s in SCHEMA.tensors}


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("a"), st.sets(st.integers(0, 20), min_size=1)),
            st.tuples(st.just("b"), st.sets(st.integers(0, 8), min_size=1)),
        ),
        max_size=8,
    ),
    st.integers(0, 21),
    st.integers(0, 21),
)
def test_a_window_knows_what_every_touched_element_was_before(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[str, set[int]]],
    one: int,
    other: int,
) -> None:
    folder = tmp_path_factory.getbasetemp() / f"window{next(_FOLDERS)}"
    window = FoldWindow(ref(0), SCHEMA, folder)
    rng = np.random.default_rng(3)
    words = {name: rng.integers(0, 200, w.size).astype(w.dtype) for name, w in zeros().items()}
    before = {name: each.tolist() for name, each in words.items()}
    seen: dict[str, set[int]] = {"a": set(), "b": set(), "c": set()}
    for name, places in steps:
        window.touch(written(words, name, sorted(places)))
        seen[name] |= places
    for tensor, spec in enumerate(SCHEMA.tensors):
        start, stop = sorted((min(one, spec.elements), min(other, spec.elements)))
        found = window.touched_in(tensor, Shard(start, stop))
        expected = sorted(place for place in seen[spec.name] if start <= place < stop)
        assert found.flat.tolist() == expected
        assert found.old.tolist() == [before[spec.name][place] for place in expected]
    assert window.touched_counts == [len(seen[name]) for name in "abc"]
    assert window.is_worthwhile == (sum(map(len, seen.values())) <= 30 // 4)
    window.close()
    assert not folder.exists()


def test_windows_are_dropped_where_the_chain_is_broken(tmp_path: Path) -> None:
    windows = FoldWindows((2,), tmp_path / "windows")
    words = zeros()
    assert list(windows.closing_windows(ref(0))) == []
    windows.open_windows(ref(0), SCHEMA)
    windows.touch(edge(ref(0), ref(1)), written(words, "a", [1]))
    assert list(windows.closing_windows(ref(1))) == []
    windows.touch(edge(ref(7), ref(8)), written(words, "a", [2]))
    assert list(windows.closing_windows(ref(8))) == []


def test_a_new_name_for_the_same_weights_breaks_no_chain(tmp_path: Path) -> None:
    windows = FoldWindows((2,), tmp_path / "windows")
    words = zeros()
    windows.open_windows(ref(0), SCHEMA)
    windows.touch(edge(ref(0), ref(1)), written(words, "a", [1]))
    renamed = ref(3, epoch=2, state=1)
    assert list(windows.closing_windows(renamed)) == []
    windows.touch(edge(renamed, ref(4, epoch=2)), written(words, "a", [2]))
    (window,) = windows.closing_windows(ref(4, epoch=2))
    assert window.base == ref(0)
    assert window.touched_in(0, Shard(0, 21)).flat.tolist() == [1, 2]
    assert VersionId(1, 0) == window.base.version
