"""Route to a policy from outside the cluster, by a Gateway that the platform runs."""

from typing import Annotated

from pydantic import Field

from etude.common.api.meta import Model, ObjectName

HOST = r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"

Namespace = Annotated[
    str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
]


class PolicyGateway(Model):
    """A Gateway that leads to the engines of a run."""

    name: ObjectName
    """The Gateway."""
    namespace: Namespace | None = None
    """Its namespace; the run's own unless set. Its listeners must allow routes from the run's."""
    section_name: ObjectName | None = None
    """One of its listeners; every one that fits unless set."""
    hostnames: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=253, pattern=HOST)], ...],
        Field(max_length=16),
    ] = ()
    """Hosts under which the policy answers; all of the listener's unless set."""
    proxy_namespace: Namespace | None = None
    """Where the Gateway's proxies run, which the run's NetworkPolicy lets in; the Gateway's own
    namespace unless set."""
    request_timeout_seconds: Annotated[int, Field(ge=0, le=86_400)] | None = None
    """How long one request may take, its streamed answer included; 0 is no limit. The Gateway's own
    limit unless set, which may be as short as 15 s. Needs a Gateway API and a Gateway that know
    timeouts of an HTTPRoute (HTTPRouteRequestTimeout among its class's supportedFeatures)."""
