"""Engines of routes that may lend to a run: those of users, while these do without."""

from collections.abc import Sequence

from etude.common.api.kinds import PolicyRoute, RLRun
from etude.operator import names
from etude.operator.builders.addresses import PORTS
from etude.operator.kube.interface import Cluster
from etude.operator.manifests import parse_object, ref
from etude.v1 import run_pb2


def find_lenders(cluster: Cluster, run: RLRun) -> list[str]:
    """Addresses of the engines of routes that serve a run and lend to it, in order."""
    routes = (
        parse_object(PolicyRoute, manifest)
        for manifest in cluster.list_objects("PolicyRoute")
        if ref(manifest).namespace == run.metadata.namespace
    )
    return sorted(
        target for route in routes if route is not None for target in _lender_targets(route, run)
    )


def _lender_targets(route: PolicyRoute, run: RLRun) -> list[str]:
    if route.spec.channels.lending is None or route.status.run_uid != run.metadata.uid:
        return []
    service, port = names.child(route.metadata.name, names.STABLE), PORTS[names.STABLE]["grpc"]
    replicas = route.spec.channels.stable.replicas
    return [names.address(service, port, ordinal) for ordinal in range(replicas)]


def lenders_command(
    lenders: Sequence[str], report: run_pb2.RunStatus
) -> run_pb2.CommandRequest | None:
    """The command for a controller that knows other lenders; None if it knows these."""
    if list(report.lender_targets) == list(lenders):
        return None
    return run_pb2.CommandRequest(set_lenders=run_pb2.SetLenders(targets=lenders))
