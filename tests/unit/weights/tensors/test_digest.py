"""The state digest: the published formula, additive, and as cheap as the change."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.weights.tensors import digest
from etude.common.weights.tensors.digest import Digest

M = (1 << 64) - 1
WORDS = [np.uint8, np.uint16, np.uint32, np.uint64]


def mix(seed: int, lane: int, word: int) -> int:
    """One term, in plain integers."""
    z = (seed + lane * 0x9E3779B97F4A7C15 + word * 0xD1B54A32D192ED03) & M
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M
    return z ^ (z >> 31)


def reference(words: list[int], width: int, first_lane: int) -> Digest:
    lanes = max(1, width // 16)
    sums = [0, 0]
    for i, word in enumerate(words):
        for part in range(lanes):
            for j, seed in enumerate((0, 0xA5A5A5A5A5A5A5A5)):
                term = mix(seed, first_lane + i * lanes + part, (word >> (16 * part)) & 0xFFFF)
                sums[j] = (sums[j] + term) & M
    return Digest(*sums)


def drawn(data: st.DataObject, word: type[np.unsignedinteger], least: int = 0) -> list[int]:
    most = (1 << np.dtype(word).itemsize * 8) - 1
    return data.draw(st.lists(st.integers(0, most), min_size=least, max_size=30))


@pytest.mark.parametrize("word", WORDS)
@given(data=st.data(), first_lane=st.integers(0, 1 << 50))
def test_a_scan_is_the_formula_over_every_lane(
    word: type[np.unsignedinteger], data: st.DataObject, first_lane: int
) -> None:
    words = drawn(data, word)
    expected = reference(words, np.dtype(word).itemsize * 8, first_lane)
    assert digest.scan(np.array(words, word), first_lane) == expected


@pytest.mark.parametrize("word", WORDS)
@given(data=st.data())
def test_a_change_leads_from_one_state_to_the_other_and_back(
    word: type[np.unsignedinteger], data: st.DataObject
) -> None:
    old = np.array(drawn(data, word, least=1), word)
    new = old.copy()
    places = np.array(sorted(data.draw(st.sets(st.integers(0, old.size - 1)))), np.int64)
    new[places] = np.array(data.draw(st.integers(0, 255)), word)
    by = digest.change(old[places], new[places], places, 9)
    assert digest.scan(old, 9).plus(by) == digest.scan(new, 9)
    assert digest.scan(new, 9).minus(by) == digest.scan(old, 9)
    assert digest.change(new[places], old[places], places, 9) == digest.ZERO.minus(by)


def test_a_swap_of_two_words_is_seen() -> None:
    words = np.array([1, 2], np.uint16)
    assert digest.scan(words, 0) != digest.scan(words[::-1], 0)


@given(st.integers(0, M), st.integers(0, M))
def test_a_digest_survives_its_text(a: int, b: int) -> None:
    text = Digest(a, b).hex()
    assert len(text) == 32
    assert Digest.parse(text) == Digest(a, b)


@pytest.mark.parametrize("text", ["", "0" * 31, "0" * 33, "G" * 32, "A" * 32, "0x" + "0" * 30])
def test_other_text_is_no_digest(text: str) -> None:
    with pytest.raises(ValueError, match="no state digest"):
        Digest.parse(text)


def test_a_role_that_may_write_nowhere_compiles_without_a_cache(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code = (
        "import numpy as np; from etude.common.weights.tensors import digest;"
        "print(digest.scan(np.arange(5, dtype=np.uint16), 0).hex())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={"NUMBA_CACHE_DIR": str(tmp_path / "file" / "no"), "HOME": "/proc"},
        timeout=120,
    )
    assert done.stdout.strip() == digest.scan(np.arange(5, dtype=np.uint16), 0).hex(), done.stderr
