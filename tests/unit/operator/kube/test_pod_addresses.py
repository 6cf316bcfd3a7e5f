"""Where the operator finds pods that their workload names by chance."""

from typing import cast

from etude.operator.kube.cache import WatchCache, reduce_object
from etude.operator.kube.client import KubernetesCluster
from etude.operator.kube.rest import RestClient


def test_a_pod_of_a_job_is_found_by_its_host_name() -> None:
    cache = WatchCache(reduce_object)  # as in a cluster
    cluster = KubernetesCluster(cast("RestClient", None), cache)  # nothing here is asked
    cache.update(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": "demo-trainer-0-0-x7k2p",
                "namespace": "lab",
                "uid": "u1",
                "resourceVersion": "5",
            },
            "spec": {"hostname": "demo-trainer-0-0"},
            "status": {"podIP": "10.0.0.7"},
        }
    )
    target = "demo-trainer-0-0.demo-trainer:7000"
    assert cluster.address("lab", target) == "demo-trainer.lab.svc@10.0.0.7:7000"
    assert cluster.address("other", target) == "demo-trainer-0-0.demo-trainer.other.svc:7000"
