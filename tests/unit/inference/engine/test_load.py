"""The load of an engine, read from the series that vLLM registers."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from etude.inference.engine.load import EngineCounters, read_load


def test_loads_of_all_cores_are_summed_and_the_fullest_cache_counts() -> None:
    registry = CollectorRegistry()
    running = Gauge("vllm:num_requests_running", "", ["engine"], registry=registry)
    waiting = Gauge("vllm:num_requests_waiting", "", ["engine"], registry=registry)
    usage = Gauge("vllm:kv_cache_usage_perc", "", ["engine"], registry=registry)
    preempted = Counter("vllm:num_preemptions", "", ["engine"], registry=registry)
    for core in range(2):
        running.labels(core).set(10 + core)
        waiting.labels(core).set(core)
        usage.labels(core).set(0.25 * core)
        preempted.labels(core).inc(3)
    assert read_load(registry) == EngineCounters(21, 1, 0.25, 6)


def test_an_engine_without_requests_yet_has_no_load() -> None:
    assert read_load(CollectorRegistry()) == EngineCounters(0, 0, 0.0, 0)
