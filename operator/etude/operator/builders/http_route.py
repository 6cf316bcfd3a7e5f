"""HTTPRoute from a Gateway of the platform to the engines of a run.

API: gateway.networking.k8s.io/v1.
"""

from collections.abc import Mapping

from etude.common.api.kinds import RLRun
from etude.common.api.run.http_gateway import PolicyGateway
from etude.operator import names
from etude.operator.builders.addresses import PORTS
from etude.operator.builders.workload import object_head, service
from etude.operator.manifests import Manifest

API = "gateway.networking.k8s.io/v1"
ENGINE_PORT = {"http": PORTS[names.INFERENCE]["http"]}


def route_objects(run: RLRun, labels: Mapping[str, str]) -> list[Manifest]:
    """A Service over the ready engines, and the HTTPRoute to it.

    Args:
        run: the run.
        labels: of the run's engines.
    """
    inference = run.spec.roles.inference
    if inference is None or inference.gateway is None:
        return []
    name = names.child(run.metadata.name, names.POLICY)
    backend = {"name": name, "port": ENGINE_PORT["http"]}
    spec: Manifest = {
        "parentRefs": [_parent(run, inference.gateway)],
        "rules": [{"backendRefs": [backend], **_timeouts(inference.gateway)}],
    }
    if inference.gateway.hostnames:
        spec["hostnames"] = [*inference.gateway.hostnames]
    # Not the engines' headless Service, which also has engines that are not ready.
    balanced = service(run, name, labels, ENGINE_PORT, is_headless=False)
    return [balanced, {**object_head(run, API, "HTTPRoute", name, labels), "spec": spec}]


def proxy_namespace(run: RLRun, gateway: PolicyGateway) -> str:
    """The namespace of the Gateway's proxies, which call the engines."""
    return gateway.proxy_namespace or gateway.namespace or run.metadata.namespace


def _timeouts(gateway: PolicyGateway) -> Manifest:
    """Timeouts of a route; empty unless set, since older CRDs and Gateways refuse them."""
    limit_s = gateway.request_timeout_seconds
    return {} if limit_s is None else {"timeouts": {"request": f"{limit_s}s"}}


def _parent(run: RLRun, gateway: PolicyGateway) -> Manifest:
    parent = {"name": gateway.name, "namespace": gateway.namespace or run.metadata.namespace}
    section = gateway.section_name
    return parent if section is None else {**parent, "sectionName": section}
