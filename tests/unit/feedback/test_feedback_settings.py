"""Settings of the feedback service, and where it refuses to listen."""

from pathlib import Path

import pytest

from etude.common.errors import UserError
from etude.common.monitors.window import Action
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


def test_rules_of_windows_and_weights_of_signals_are_read() -> None:
    rules = Settings.from_env(
        ENV
        | {
            "ETUDE_FEEDBACK_WINDOW_ROLLOUTS": "50",
            "ETUDE_FEEDBACK_WINDOW_AGE_S": "60",
            "ETUDE_FEEDBACK_HORIZON_S": "5",
            "ETUDE_FEEDBACK_SIGNALS": "thumb=0, deferral=-2.5",
            "ETUDE_FEEDBACK_MONITORS": "Deferral=Penalise, EditRate=Freeze",
        }
    ).windows
    assert (rules.num_rollouts, rules.min_rollouts) == (50, 50)
    assert (rules.max_age_s, rules.horizon_s) == (60, 5)
    default = Settings.from_env(ENV).windows.weights
    assert rules.weights == {**default, "thumb": 0.0, "deferral": -2.5}
    assert rules.actions == {"Deferral": Action.PENALISE, "EditRate": Action.FREEZE}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ETUDE_FEEDBACK_WINDOW_ROLLOUTS", "10001"),
        ("ETUDE_FEEDBACK_WINDOW_MIN_ROLLOUTS", "1001"),
        ("ETUDE_FEEDBACK_HORIZON_S", "0"),
        ("ETUDE_FEEDBACK_SIGNALS", "smiles=1"),
        ("ETUDE_FEEDBACK_SIGNALS", "thumb"),
        ("ETUDE_FEEDBACK_SIGNALS", "thumb=nan"),
        ("ETUDE_FEEDBACK_SIGNALS", "thumb=1e9"),
        ("ETUDE_FEEDBACK_MONITORS", "Smiles=Warn"),
        ("ETUDE_FEEDBACK_MONITORS", "Deferral=Ignore"),
        ("ETUDE_FEEDBACK_MONITORS", "EditRate=Penalise"),
    ],
)
def test_impossible_rules_are_refused_by_the_name_of_the_variable(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        Settings.from_env(ENV | {name: value})
