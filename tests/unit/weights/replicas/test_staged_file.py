"""Staged blocks survive their file, and a cut-off file is corrupt."""

from pathlib import Path

import numpy as np
import pytest
from tests.support.weights.live_words import (
    PLAIN,
    blocks,
    changed_words,
    equal,
    random_words,
    some_block,
    whole,
)

from etude.common.errors import CorruptError
from etude.common.weights.coding.codecs.ids import Codec
from etude.common.weights.replicas import staged_file
from etude.common.weights.replicas.staged_file import StagedBlock
from etude.common.weights.tensors import digest


def test_staged_blocks_survive_their_file(tmp_path: Path) -> None:
    old = random_words(PLAIN, 1)
    new = changed_words(PLAIN, old, 5, 0.02)
    path = tmp_path / "staged"
    undecoded = StagedBlock(3, 0, 0, 9, Codec.L2, None, None, b"abcde", flags=0, changed=4)
    expected = [*blocks(PLAIN, old, new), *blocks(PLAIN, old, new, dense=True)[:5], undecoded]
    staged_file.write_blocks(path, iter(expected))
    assert not list(tmp_path.glob("*.partial"))
    found = staged_file.read_staged(path)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one[:5] == other[:5]
        assert (one.index is None) == (other.index is None)
        assert (one.data is None) == (other.data is None)
        if one.index is not None and other.index is not None:
            assert np.array_equal(one.index, other.index)
        if one.data is not None and other.data is not None:
            assert np.array_equal(one.data, other.data)
            assert one.data.dtype == other.data.dtype
    assert bytes(found[-1].payload or b"") == b"abcde"
    assert found[-1].num_changed == 4


def test_a_version_comes_through_a_staged_file(tmp_path: Path) -> None:
    old = random_words(PLAIN, 1)
    new = changed_words(PLAIN, old, 5, 0.02)
    staged_file.write_blocks(tmp_path / "staged", blocks(PLAIN, old, new))
    live, memory = whole(PLAIN, old)
    assert live.write(live.prepare(staged_file.read_staged(tmp_path / "staged")))
    assert equal(memory, new)


def test_a_cut_off_staged_file_is_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "staged"
    staged_file.write_blocks(path, [some_block(), some_block(lo=1)])
    whole_file = path.read_bytes()
    for size in range(len(whole_file)):
        path.write_bytes(whole_file[:size])
        with pytest.raises(CorruptError):
            staged_file.read_staged(path)


def test_an_empty_version_is_staged_and_committed(tmp_path: Path) -> None:
    staged_file.write_blocks(tmp_path / "staged", [])
    live, _ = whole(PLAIN, random_words(PLAIN, 1))
    prepared = live.prepare(staged_file.read_staged(tmp_path / "staged"))
    assert prepared.digest == digest.ZERO
    assert (prepared.changed, prepared.num_bytes) == (0, 0)
    assert live.write(prepared)
