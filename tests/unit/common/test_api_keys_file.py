"""API keys of gateway and feedback: digests alone, closed when the file cannot be read."""

from pathlib import Path

import pytest

from etude.common import api_keys
from etude.common.api_keys import RELOAD_S, ApiKeyFile, KeyScope, UnauthenticatedError
from etude.common.errors import ForbiddenError, FullError, UserError


class Clock:
    """A clock that is set by hand."""

    now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def write(path: Path, *lines: str) -> Path:
    path.write_text("# keys\n\n" + "\n".join(lines) + "\n")
    return path


def opened(path: Path) -> tuple[ApiKeyFile, Clock]:
    clock = Clock()
    return ApiKeyFile.load(path, clock=clock), clock


def test_a_key_is_known_by_its_digest_alone(tmp_path: Path) -> None:
    key, line = api_keys.make_key("alice", "serve,feedback")
    assert key not in line
    keys, _ = opened(write(tmp_path / "keys", f"{line} tenant=acme consent=2026-11 limit=60"))
    owner = keys.identify(key)
    assert (owner.user, owner.tenant, owner.consent, owner.limit) == (
        "alice",
        "acme",
        "2026-11",
        60,
    )
    assert owner.scopes == {KeyScope.SERVE, KeyScope.FEEDBACK}
    for wrong in ("", key[:-1], key + "x", "é" * 1_000):
        with pytest.raises(UnauthenticatedError):
            keys.identify(wrong)


@pytest.mark.parametrize(
    "line",
    [
        "alice serve",
        "alice serve 12",
        "alice king " + "0" * 64,
        "al$ce serve " + "0" * 64,
        "alice serve " + "0" * 64 + " owner=bob",
        "alice serve " + "0" * 64 + " limit=many",
        "alice serve " + "0" * 64 + " limit=0",
        "",
    ],
)
def test_a_bad_line_is_refused_with_its_place(tmp_path: Path, line: str) -> None:
    with pytest.raises(UserError, match="keys"):
        ApiKeyFile.load(write(tmp_path / "keys", line))


def test_a_key_that_is_taken_back_ends_within_seconds(tmp_path: Path) -> None:
    key, line = api_keys.make_key("alice", "feedback")
    _, other = api_keys.make_key("bob", "feedback")
    keys, clock = opened(write(tmp_path / "keys", line, other))
    write(tmp_path / "keys", other)
    clock.now_s += RELOAD_S
    with pytest.raises(UnauthenticatedError):
        keys.identify(key)


def test_the_last_key_can_be_taken_back(tmp_path: Path) -> None:
    key, line = api_keys.make_key("alice", "feedback")
    keys, clock = opened(write(tmp_path / "keys", line))
    write(tmp_path / "keys", "")
    clock.now_s += RELOAD_S
    with pytest.raises(UnauthenticatedError):
        keys.identify(key)


def test_a_bad_line_keeps_no_removed_key_alive(tmp_path: Path) -> None:
    key, line = api_keys.make_key("alice", "feedback")
    other_key, other = api_keys.make_key("bob", "feedback")
    keys, clock = opened(write(tmp_path / "keys", line))
    write(tmp_path / "keys", "alice king 12", other)
    clock.now_s += RELOAD_S
    assert keys.identify(other_key).user == "bob"
    with pytest.raises(UnauthenticatedError):
        keys.identify(key)


def test_a_file_that_cannot_be_read_takes_every_consent_back(tmp_path: Path) -> None:
    key, line = api_keys.make_key("alice", "feedback")
    path = write(tmp_path / "keys", f"{line} consent=v1")
    keys, clock = opened(path)
    path.write_bytes(b"\xff")
    clock.now_s += RELOAD_S
    assert keys.identify(key).consent == ""
    write(path, f"{line} consent=v2")
    clock.now_s += RELOAD_S
    assert keys.identify(key).consent == "v2"


def test_a_key_has_a_rate(tmp_path: Path) -> None:
    key, line = api_keys.make_key("alice", "feedback")
    keys, clock = opened(write(tmp_path / "keys", f"{line} limit=60"))
    keys.count(key, 60)
    with pytest.raises(FullError) as refused:
        keys.count(key)
    clock.now_s += refused.value.retry_after_s
    keys.count(key)
    with pytest.raises(FullError):
        keys.count(key)


def test_the_processes_of_a_service_share_the_rate_that_it_gives(tmp_path: Path) -> None:
    key, line = api_keys.make_key("jo@corp", "serve")
    path = write(tmp_path / "keys", line)
    keys = ApiKeyFile.load(path, num_processes=2, default_limit=4, clock=Clock())
    keys.count(key, 2)
    with pytest.raises(FullError, match="4 requests") as refused:
        keys.count(key)
    assert 0 < refused.value.retry_after_s <= 30


def test_a_scope_that_a_key_lacks_is_named(tmp_path: Path) -> None:
    key, line = api_keys.make_key("alice", "serve")
    keys, _ = opened(write(tmp_path / "keys", line))
    api_keys.require_scope(keys.identify(key), KeyScope.SERVE, KeyScope.ADMIN)
    with pytest.raises(ForbiddenError, match="export"):
        api_keys.require_scope(keys.identify(key), KeyScope.EXPORT)
