"""Reward files: one number from 0 to 1 is a reward, and nothing else ever becomes one."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.harbor import task

REWARDS = {
    b"1": 1.0,
    b"1\n": 1.0,
    b" 0.25 \r\n": 0.25,
    b"+1.0e0": 1.0,
    b".5": 0.5,
    b"5e-1": 0.5,
    b"-0": 0.0,
    b'{"reward": 1}': 1.0,
    b'{"reward": 0.5, "style": 0.1, "tests": 7}': 0.5,
    b' {"accuracy": 1e-1}\n': 0.1,
}

NOT_REWARDS = {
    "nothing": b"",
    "white space": b" \n",
    "NaN": b"nan",
    "NaN, spelt as JSON": b"NaN",
    "infinity": b"inf",
    "minus infinity": b"-Infinity",
    "overflow": b"1e309",
    "digits without end": b"9" * 60_000,
    "above 1": b"1.0000001",
    "below 0": b"-1e-9",
    "two numbers": b"1 or 1",
    "two lines": b"1\n0\n",
    "a comma": b"0,5",
    "hexadecimal": b"0x1",
    "underscores": b"1_0",
    "Arabic digits": "\u0661".encode(),
    "a word": b"true",
    "NUL": b"1\0",
    "no UTF-8": b"\xff1",
    "a list": b"[1]",
    "a string": b'"1"',
    "an empty object": b"{}",
    "two keys, none of them reward": b'{"a": 1, "b": 0}',
    "one key twice": b'{"reward": 0, "reward": 1}',
    "another key twice": b'{"reward": 1, "a": 1, "a": 1}',
    "a truth value": b'{"reward": true}',
    "a number in quotes": b'{"reward": "1"}',
    "null": b'{"reward": null}',
    "an object in it": b'{"reward": {"reward": 1}}',
    "a list in it": b'{"reward": [1]}',
    "NaN in it": b'{"reward": NaN}',
    "infinity in it": b'{"reward": Infinity}',
    "overflow in it": b'{"reward": 1e309}',
    "digits without end in it": b'{"reward": ' + b"9" * 5_000 + b"}",
    "above 1 in it": b'{"reward": 2}',
    "half an object": b'{"reward": 1',
    "something behind it": b'{"reward": 1} 1',
    "depth": b'{"a":' * 10_000,
    "UTF-16": '{"reward": 1}'.encode("utf-16"),
    "too large": b"1" + b" " * task.MAX_REWARD_BYTES,
}


@pytest.mark.parametrize("data", REWARDS, ids=repr)
def test_one_number_is_a_reward(data: bytes) -> None:
    assert task.parse_reward(data) == REWARDS[data]


@pytest.mark.parametrize("case", NOT_REWARDS)
def test_anything_else_is_refused_and_never_a_reward(case: str) -> None:
    with pytest.raises(ValueError, match="reward"):
        task.parse_reward(NOT_REWARDS[case])


@given(st.binary(max_size=64))
def test_whatever_a_verifier_writes_is_a_number_in_range_or_refused(data: bytes) -> None:
    try:
        value = task.parse_reward(data)
    except ValueError:
        return
    assert 0 <= value <= 1
    assert math.isfinite(value)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(["reward", "a", "b"]), _JSON, max_size=3))
def test_an_object_is_worth_its_one_number_or_nothing(found: dict[str, object]) -> None:
    chosen = found.get("reward", next(iter(found.values()), None) if len(found) == 1 else None)
    is_number = isinstance(chosen, int | float) and not isinstance(chosen, bool)
    expected = chosen if is_number and 0 <= chosen <= 1 else None  # type: ignore[operator]
    try:
        value = task.parse_reward(json.dumps(found).encode())
    except ValueError:
        assert expected is None
    else:
        assert value == expected
