"""API keys: owners, scopes, quotas, and what is taken back while the gateway runs."""

from pathlib import Path

import pytest

from etude.common.errors import FullError, UserError
from etude.gateway.api_keys import ApiKeyFile, Scope, ScopeError, UnauthenticatedError, make_key


def write_keys(path: Path, *lines: str) -> None:
    path.write_text("\n".join(lines) + "\n")


def test_a_key_has_an_owner_and_scopes(tmp_path: Path) -> None:
    key, line = make_key("alice", "serve,feedback")
    write_keys(tmp_path / "keys", "# users", f"{line} tenant=acme consent=v1")
    keys = ApiKeyFile.load(tmp_path / "keys")
    caller = keys.admit(key, Scope.SERVE)
    assert (caller.user, caller.tenant, caller.consent) == ("alice", "acme", "v1")
    with pytest.raises(ScopeError, match="admin"):
        keys.admit(key, Scope.ADMIN)
    with pytest.raises(UnauthenticatedError):
        keys.admit(key + "x", Scope.SERVE)
    assert key not in (tmp_path / "keys").read_text()


@pytest.mark.parametrize(
    "line",
    [
        "alice serve",
        "alice serve nothex",
        f"alice judge {'0' * 64}",
        f"../a serve {'0' * 64}",
        f"alice serve {'0' * 64} colour=red",
        f"alice serve {'0' * 64} limit=none",
        "# nothing",
    ],
)
def test_a_wrong_line_is_refused_by_its_number(tmp_path: Path, line: str) -> None:
    write_keys(tmp_path / "keys", line)
    with pytest.raises(UserError, match=r"keys(:1)?  "):
        ApiKeyFile.load(tmp_path / "keys")


def test_a_quota_is_shared_by_the_processes(tmp_path: Path) -> None:
    key, line = make_key("alice", "serve")
    write_keys(tmp_path / "keys", f"{line} limit=4")
    keys = ApiKeyFile.load(tmp_path / "keys", num_processes=2)
    for _ in range(2):
        keys.admit(key, Scope.SERVE)
    with pytest.raises(FullError, match="4 requests a minute") as caught:
        keys.admit(key, Scope.SERVE)
    assert 0 < caught.value.retry_after_s <= 30


def test_a_consent_ends_when_its_line_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.gateway.api_keys.RELOAD_S", 0.0)
    path = tmp_path / "keys"
    key, line = make_key("alice", "serve")
    write_keys(path, f"{line} consent=v1")
    keys = ApiKeyFile.load(path)
    assert keys.admit(key, Scope.SERVE).consent == "v1"
    write_keys(path, line)
    assert keys.admit(key, Scope.SERVE).consent == ""
    write_keys(path, make_key("bob", "serve")[1])
    with pytest.raises(UnauthenticatedError):
        keys.admit(key, Scope.SERVE)


def test_a_file_that_cannot_be_read_takes_consents_back_and_no_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.gateway.api_keys.RELOAD_S", 0.0)
    path = tmp_path / "keys"
    key, line = make_key("alice", "serve")
    write_keys(path, f"{line} consent=v1")
    keys = ApiKeyFile.load(path)
    hidden = tmp_path / "hidden"
    path.rename(hidden)
    assert keys.admit(key, Scope.SERVE).consent == ""
    hidden.rename(path)
    assert keys.admit(key, Scope.SERVE).consent == "v1"
