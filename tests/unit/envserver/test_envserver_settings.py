"""What brokers and nodes read from their environment."""

from etude.envserver.settings import NodeSettings

ENV = {
    "ETUDE_POOL_FILE": "/pool.json",
    "ETUDE_BROKER_TARGET": "broker:7020",
    "ETUDE_SCRATCH": "/scratch",
}


def test_the_collector_of_trace_spans_is_a_setting_of_ours() -> None:
    told = NodeSettings.from_env(ENV | {"ETUDE_OTLP_ENDPOINT": "http://collector:4317"})
    assert told.server.otlp_endpoint == "http://collector:4317"
    assert NodeSettings.from_env(ENV).server.otlp_endpoint is None
