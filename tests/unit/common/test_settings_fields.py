"""Settings are parsed from the environment, or refused with the variable's name."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from etude.common.settings_fields import (
    parse_count,
    parse_flag,
    parse_names,
    parse_path,
    parse_port,
)


def test_values_are_parsed() -> None:
    env = {"PORT": "7010", "FLAG": "1", "NAMES": "a, b,,c", "COUNT": "3", "FILE": "/tmp/x"}
    assert parse_port(env, "PORT", 1) == 7010
    assert parse_flag(env, "FLAG")
    assert parse_names(env, "NAMES") == ("a", "b", "c")
    assert parse_count(env, "COUNT", 1, high=3) == 3
    assert parse_path(env, "FILE") == Path("/tmp/x")


def test_defaults_stand_for_unset_variables() -> None:
    assert parse_port({}, "PORT", 7010) == 7010
    assert not parse_flag({}, "FLAG")
    assert parse_names({}, "NAMES") == ()
    assert parse_count({}, "COUNT", 2, high=3) == 2
    assert parse_path({"FILE": ""}, "FILE") is None


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (lambda env: parse_port(env, "X", 1), "65536"),
        (lambda env: parse_port(env, "X", 1), "http"),
        (lambda env: parse_flag(env, "X"), "yes"),
        (lambda env: parse_count(env, "X", 1, low=1, high=9), "0"),
        (lambda env: parse_count(env, "X", 1, high=9), "-1"),
    ],
)
def test_an_invalid_value_is_refused_by_name(
    parse: Callable[[Mapping[str, str]], object], text: str
) -> None:
    with pytest.raises(ValueError, match=r"X: .* is not"):
        parse({"X": text})
