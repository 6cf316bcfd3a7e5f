"""What brokers and nodes read from their environment."""

import pytest

from etude.common.broker_shards import SINGLE_BROKER, BrokerShard
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
    assert told.broker_targets == ("a:1", "b:2")
    with pytest.raises(ValueError, match="ETUDE_BROKER_TARGET"):
        HostSettings.from_env(ENV | {"ETUDE_BROKER_TARGET": "a:1,"})


def test_a_broker_is_the_only_one_unless_told() -> None:
    assert BrokerSettings.from_env(ENV).shard == SINGLE_BROKER
    assert BrokerSettings.from_env(ENV | {"ETUDE_SHARD": "1/3"}).shard == BrokerShard(1, 3)
    with pytest.raises(ValueError, match="ETUDE_SHARD"):
        BrokerSettings.from_env(ENV | {"ETUDE_SHARD": "3/3"})
