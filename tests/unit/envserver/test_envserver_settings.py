"""What brokers and nodes read from their environment."""

import pytest

from etude.envserver.settings import BrokerSettings, HostSettings

ENV = {
    "ETUDE_POOL_FILE": "/pool.json",
    "ETUDE_BROKER_TARGET": "broker:7020",
    "ETUDE_SCRATCH": "/scratch",
}


def test_the_collector_of_trace_spans_is_a_setting_of_ours() -> None:
    told = HostSettings.from_env(ENV | {"ETUDE_OTLP_ENDPOINT": "http://collector:4317"})
    assert told.server.otlp_endpoint == "http://collector:4317"
    assert HostSettings.from_env(ENV).server.otlp_endpoint is None


def test_a_host_may_have_several_brokers() -> None:
    told = HostSettings.from_env(ENV | {"ETUDE_BROKER_TARGET": "a:1, b:2"})
    assert told.brokers.text == "a:1, b:2"
    with pytest.raises(ValueError, match="ETUDE_BROKER_TARGET"):
        HostSettings.from_env(ENV | {"ETUDE_BROKER_TARGET": "a:1,"})


def test_a_broker_is_the_only_one_unless_told() -> None:
    alone = {name: text for name, text in ENV.items() if name != "ETUDE_BROKER_TARGET"}
    assert BrokerSettings.from_env(alone).addresses is None
    found = BrokerSettings.from_env(ENV | {"ETUDE_ADVERTISE": "10.0.0.1:7020"})
    assert found.addresses is not None
    assert (found.addresses.text, found.advertise) == ("broker:7020", "10.0.0.1:7020")
    with pytest.raises(ValueError, match="ETUDE_BROKER_TARGET"):
        BrokerSettings.from_env(ENV | {"ETUDE_BROKER_TARGET": "a:1,"})
