"""Settings of the feedback service, and where it refuses to listen."""

from pathlib import Path

import pytest

from etude.common.errors import UserError
from etude.feedback.service import serve
from etude.feedback.settings import Settings

ENV = {
    "ETUDE_FEEDBACK_STORE": "s3://bucket/feedback",
    "ETUDE_FEEDBACK_KEY_STORE": "s3://keys/feedback",
    "ETUDE_FEEDBACK_SECRET_FILE": "/etc/secret",
    "ETUDE_FEEDBACK_API_KEYS": "/etc/keys",
}


def test_the_needed_variables_are_enough() -> None:
    settings = Settings.from_env(ENV)
    assert (settings.host, settings.port, settings.ledger) == ("127.0.0.1", 7060, "feedback")
    assert settings.tls_folder is None


@pytest.mark.parametrize("name", ENV)
def test_a_missing_variable_is_named(name: str) -> None:
    with pytest.raises(KeyError, match=name):
        Settings.from_env({key: value for key, value in ENV.items() if key != name})


@pytest.mark.parametrize("keys", ["s3://bucket/feedback", "s3://bucket/feedback/keys"])
def test_keys_inside_the_ledgers_store_are_refused(keys: str) -> None:
    with pytest.raises(ValueError, match="ETUDE_FEEDBACK_KEY_STORE"):
        Settings.from_env(ENV | {"ETUDE_FEEDBACK_KEY_STORE": keys})


async def test_what_users_send_does_not_leave_the_machine_in_the_clear(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="what users send"):
        await serve(Settings.from_env(ENV | {"ETUDE_HOST": "0.0.0.0"}))
    with pytest.raises(UserError, match=r"tls\.key"):
        await serve(Settings.from_env(ENV | {"ETUDE_FEEDBACK_TLS": str(tmp_path)}))
