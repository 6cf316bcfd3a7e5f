"""API keys: made, read, found, refused."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.envserver.environment_api import api_keys
from etude.envserver.environment_api.api_keys import (
    BadKeysError,
    Caller,
    Keys,
    Role,
    UnknownKeyError,
)


def loaded(folder: Path, *lines: str) -> Keys:
    path = folder / "keys"
    path.write_text("".join(f"{line}\n" for line in lines))
    return api_keys.load(path)


def test_a_key_that_was_made_opens_what_its_role_says(tmp_path: Path) -> None:
    alice, first = api_keys.made("alice", Role.FULL)
    agent, second = api_keys.made("agent", Role.TOOLS)

    found = loaded(tmp_path, "# people", first, "", "# policies", second)

    assert found.caller(alice) == Caller("alice", Role.FULL)
    assert found.caller(agent) == Caller("agent", Role.TOOLS)


def test_a_file_of_keys_holds_no_key(tmp_path: Path) -> None:
    key, line = api_keys.made("alice", Role.FULL)

    assert key not in line
    assert key.removeprefix("etude_") not in line


@given(st.text())
def test_no_other_text_is_a_key(text: str) -> None:
    _, line = api_keys.made("alice", Role.FULL)
    name, role, digest = line.split()
    known = Keys([api_keys._Entry(Caller(name, Role(role)), bytes.fromhex(digest))])

    with pytest.raises(UnknownKeyError):
        known.caller(text)
    with pytest.raises(UnknownKeyError):
        known.caller(digest)


@pytest.mark.parametrize(
    "line",
    [
        "alice full",
        "alice owner " + "0" * 64,
        "alice full " + "0" * 63,
        "Alice full " + "0" * 64,
        "../x full " + "0" * 64,
        "alice full " + "0" * 64 + " more",
    ],
)
def test_a_line_that_is_no_key_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(BadKeysError, match=r"keys:2"):
        loaded(tmp_path, "# keys", line)


def test_a_file_without_keys_or_with_a_name_twice_is_refused(tmp_path: Path) -> None:
    _, line = api_keys.made("alice", Role.FULL)
    for lines in ((), ("# nobody",), (line, line)):
        with pytest.raises(BadKeysError, match="etude-envserver key"):
            loaded(tmp_path, *lines)
    with pytest.raises(BadKeysError):
        api_keys.load(tmp_path / "missing")


@pytest.mark.parametrize("name", ["", "A", "a b", "-a", "a" * 41])
def test_a_name_that_cannot_stand_in_the_file_is_refused(name: str) -> None:
    with pytest.raises(BadKeysError):
        api_keys.made(name, Role.FULL)
