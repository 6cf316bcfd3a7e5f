"""Settings and routes: what is wrong is named before anything listens."""

import json
from pathlib import Path

import pytest

from etude.common.errors import UserError
from etude.gateway.settings import Settings, read_route

NEEDED = {"ETUDE_GATEWAY_ROUTE": "r", "ETUDE_GATEWAY_KEYS": "k", "ETUDE_SCRATCH": "s"}


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_setting_is_named(name: str) -> None:
    with pytest.raises(KeyError, match=name):
        Settings.from_env({key: value for key, value in NEEDED.items() if key != name})


@pytest.mark.parametrize(
    "wrong", ["ETUDE_PORT", "ETUDE_GATEWAY_PROCESSES", "ETUDE_GATEWAY_SESSION_TOKENS"]
)
def test_a_wrong_setting_is_named(wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        Settings.from_env({**NEEDED, wrong: "many"})


@pytest.mark.parametrize(
    ("wrong", "fields"),
    [
        ("stable", {"stable": []}),
        ("modelUri", {"modelUri": "ftp://models"}),
        ("experiment", {"experiment": {"name": "a", "salt": "s", "share": 5001}}),
        # It would compare the stable channel with itself.
        ("experiment.share", {"experiment": {"name": "a", "salt": "s", "share": 1}}),
        # Two places would decide.
        (
            "experiment",
            {
                "experiment": {"name": "a", "salt": "s", "share": 0},
                "channels": {"uri": "file:///run"},
            },
        ),
        # Records in the clear: that has to be said.
        ("recordUnencrypted", {"storage": {"uri": "file:///records"}}),
        ("recordUnencrypted", {"recordUnencrypted": True, "feedback": "feedback:7091"}),
    ],
)
def test_a_wrong_field_of_a_route_is_named(
    tmp_path: Path, wrong: str, fields: dict[str, object]
) -> None:
    route = {"model": "m", "modelUri": "file:///m", "stable": ["a:1"], **fields}
    (tmp_path / "route.json").write_text(json.dumps(route))
    with pytest.raises(UserError, match=wrong):
        read_route(tmp_path / "route.json")
