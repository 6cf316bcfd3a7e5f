"""What an edge is told at its start."""

import pytest

from etude.envserver.environment_api.settings import EnvironmentApiSettings

NEEDED = {"ETUDE_BROKER_TARGET": "127.0.0.1:7020", "ETUDE_EDGE_KEYS": "keys"}


def test_what_is_not_said_has_a_default() -> None:
    settings = EnvironmentApiSettings.from_env(NEEDED)

    assert (settings.host, settings.port, settings.max_sandboxes) == ("127.0.0.1", 7050, 100)
    assert settings.workspace == "empty:"


@pytest.mark.parametrize("name", sorted(NEEDED))
def test_what_is_needed_is_named(name: str) -> None:
    with pytest.raises(KeyError, match=name):
        EnvironmentApiSettings.from_env(
            {key: value for key, value in NEEDED.items() if key != name}
        )


@pytest.mark.parametrize("name", ["ETUDE_PORT", "ETUDE_PROBE_PORT", "ETUDE_EDGE_MAX_SANDBOXES"])
@pytest.mark.parametrize("text", ["", "x", "-1", "99999", "1.5"])
def test_what_cannot_be_read_is_named(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=name):
        EnvironmentApiSettings.from_env({**NEEDED, name: text})


def test_an_edge_knows_several_brokers() -> None:
    brokers = [f"broker-{place}:7020" for place in range(3)]
    told = {**NEEDED, "ETUDE_BROKER_TARGET": ",".join(brokers)}
    assert EnvironmentApiSettings.from_env(told).brokers == ",".join(brokers)
    with pytest.raises(ValueError, match="ETUDE_BROKER_TARGET"):
        EnvironmentApiSettings.from_env({**NEEDED, "ETUDE_BROKER_TARGET": "a:1,,"})
