"""Sealed turns: only the holder of a user's key reads them, and nobody after it is destroyed."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.errors import CorruptError
from etude.common.turns.turn_sealing import TurnKey, TurnSealer, derive_public_key, open_turn
from etude.v1 import turns_pb2

_IDS = st.lists(st.integers(0, 2**31 - 1), max_size=50)
_KEY = bytes(range(32))


def _record(prompt: list[int], sampled: list[int]) -> turns_pb2.TurnRecord:
    return turns_pb2.TurnRecord(
        turn_id="turn-1",
        tenant="acme",
        user="alice",
        arm="stable",
        prompt_token_ids=prompt,
        token_ids=sampled,
        logprobs=[-0.5] * len(sampled),
    )


def _sealer(key: bytes = _KEY) -> TurnSealer:
    return TurnSealer.make(TurnKey("0f" * 16, 2, derive_public_key(key)))


@given(prompt=_IDS, sampled=_IDS)
def test_a_sealed_turn_opens_to_what_it_was_without_the_name_of_its_user(
    prompt: list[int], sampled: list[int]
) -> None:
    record = _record(prompt, sampled)
    _sealer().seal(record)
    assert (record.user, record.user_digest) == ("", "0f" * 16)
    assert (record.sealed.num_tokens, record.sealed.key_generation) == (len(sampled), 2)
    expected = _record(prompt, sampled)
    expected.user, expected.user_digest = "", "0f" * 16
    assert open_turn(record, _KEY) == expected


def test_stored_bytes_hold_neither_the_tokens_nor_the_name() -> None:
    record = _record([7] * 64, [9] * 64)
    _sealer().seal(record)
    stored = record.SerializeToString()
    assert not any(each in stored for each in (b"alice", bytes([7] * 8), bytes([9] * 8)))


def test_another_key_opens_nothing() -> None:
    record = _record([1], [2])
    _sealer().seal(record)
    with pytest.raises(CorruptError, match="turn-1: does not decrypt"):
        open_turn(record, os.urandom(32))


@pytest.mark.parametrize("part", ["writer_key", "nonce", "ciphertext"])
@given(data=st.data())
def test_a_damaged_turn_is_refused(part: str, data: st.DataObject) -> None:
    record = _record([1, 2, 3], [4])
    _sealer().seal(record)
    stored = bytearray(getattr(record.sealed, part))
    place = data.draw(st.integers(0, len(stored) - 1))
    # The highest bit of an X25519 key does not count (RFC 7748 §5).
    stored[place] ^= data.draw(st.integers(1, 0x7F if part == "writer_key" else 0xFF))
    setattr(record.sealed, part, bytes(stored))
    with pytest.raises(CorruptError):
        open_turn(record, _KEY)


@given(writer_key=st.binary(max_size=64), text=st.binary(max_size=64))
def test_whatever_a_store_returns_is_refused_by_name(writer_key: bytes, text: bytes) -> None:
    record = turns_pb2.TurnRecord(turn_id="turn-1")
    record.sealed.writer_key, record.sealed.ciphertext = writer_key, text
    record.sealed.nonce = bytes(12)
    with pytest.raises(CorruptError):
        open_turn(record, _KEY)


def test_the_tokens_of_one_turn_do_not_open_as_another_s() -> None:
    first, second = _record([1], [2]), _record([3], [4])
    second.turn_id = "turn-2"
    sealer = _sealer()
    sealer.seal(first)
    sealer.seal(second)
    second.sealed.CopyFrom(first.sealed)
    with pytest.raises(CorruptError, match="turn-2"):
        open_turn(second, _KEY)
