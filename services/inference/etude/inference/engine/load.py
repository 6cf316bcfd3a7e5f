"""Load of the engine of this process, as vLLM counts it in the registry of metrics."""

from typing import NamedTuple

from prometheus_client import REGISTRY, CollectorRegistry

from etude.v1 import inference_pb2

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
KV_CACHE_USAGE, PREEMPTIONS = "vllm:kv_cache_usage_perc", "vllm:num_preemptions_total"


class EngineCounters(NamedTuple):
    """Load of the engine; all 0 before its first request."""

    running: int
    waiting: int
    kv_cache_usage: float
    """Of the fullest cache, 0 to 1."""
    preemptions: int

    def to_proto(self) -> inference_pb2.GetEngineLoadResponse:
        """This load on the wire."""
        return inference_pb2.GetEngineLoadResponse(
            running=self.running,
            waiting=self.waiting,
            kv_cache_usage=self.kv_cache_usage,
            preemptions=self.preemptions,
        )


def read_load(registry: CollectorRegistry = REGISTRY) -> EngineCounters:
    """Read the counters of all engine cores of this process."""
    found: dict[str, list[float]] = {
        name: [] for name in (RUNNING, WAITING, KV_CACHE_USAGE, PREEMPTIONS)
    }
    for family in registry.collect():
        for sample in family.samples:
            if sample.name in found:
                found[sample.name].append(sample.value)
    return EngineCounters(
        running=int(sum(found[RUNNING])),
        waiting=int(sum(found[WAITING])),
        kv_cache_usage=max(found[KV_CACHE_USAGE], default=0.0),
        preemptions=int(sum(found[PREEMPTIONS])),
    )
