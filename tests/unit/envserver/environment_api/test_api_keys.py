"""API keys: made, read, found, refused."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.envserver.environment_api import api_keys
from etude.envserver.environment_api.api_keys import (
    ApiCaller,
    ApiKeys,
    BadKeysError,
    KeyRole,
    UnknownKeyError,
)


def loaded(folder: Path, *lines: str) -> ApiKeys:
    path = folder / "keys"
    path.write_text("".join(f"{line}\n" for line in lines))
    return api_keys.load_keys(path)


def test_a_key_that_was_made_opens_what_its_role_says(tmp_path: Path) -> None:
    alice, first = api_keys.make_key("alice", KeyRole.FULL)
    agent, second = api_keys.make_key("agent", KeyRole.TOOLS)

    found = loaded(tmp_path, "# people", first, "", "# policies", second)

    assert found.identify(alice) == ApiCaller("alice", KeyRole.FULL)
    assert found.identify(agent) == ApiCaller("agent", KeyRole.TOOLS)


def test_a_file_of_keys_holds_no_key(tmp_path: Path) -> None:
    key, line = api_keys.make_key("alice", KeyRole.FULL)

    assert key not in line
    assert key.removeprefix("etude_") not in line


@given(st.text())
def test_no_other_text_is_a_key(text: str) -> None:
    _, line = api_keys.make_key("alice", KeyRole.FULL)
    name, role, digest = line.split()
    known = ApiKeys([api_keys._Entry(ApiCaller(name, KeyRole(role)), bytes.fromhex(digest))])

    with pytest.raises(UnknownKeyError):
        known.identify(text)
    with pytest.raises(UnknownKeyError):
        known.identify(digest)


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
    _, line = api_keys.make_key("alice", KeyRole.FULL)
    for lines in ((), ("# nobody",), (line, line)):
        with pytest.raises(BadKeysError, match="etude-envserver key"):
            loaded(tmp_path, *lines)
    with pytest.raises(BadKeysError):
        api_keys.load_keys(tmp_path / "missing")


@pytest.mark.parametrize("name", ["", "A", "a b", "-a", "a" * 41])
def test_a_name_that_cannot_stand_in_the_file_is_refused(name: str) -> None:
    with pytest.raises(BadKeysError):
        api_keys.make_key(name, KeyRole.FULL)
