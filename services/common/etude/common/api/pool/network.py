"""Egress rules of environments, and network policies of a run's pods."""

from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from etude.common.api.meta import NAMED, Model, Name, NameRef, Rule

_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
HOST = rf"^(\*\.)?({_LABEL}\.)+[a-z]([a-z0-9-]{{0,61}}[a-z0-9])?$"
PATH = r"^/[A-Za-z0-9._~!$&'()*+,;=:@/-]*$"
HEADER = r"^[A-Za-z][A-Za-z0-9-]{0,63}$"
DATA_KEY = r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?$"

_OWN_HEADERS = (
    *("host", "connection", "content-length", "content-type", "content-encoding", "expect"),
    *("accept-encoding", "transfer-encoding", "te", "trailer", "upgrade", "keep-alive", "range"),
)


class EgressPolicy(StrEnum):
    """Extent of an environment's egress."""

    NONE = "None"
    PUBLIC = "Public"
    CUSTOM = "Custom"


class EgressMode(StrEnum):
    """Protocol between an environment and a host."""

    TUNNEL = "Tunnel"
    HTTP = "Http"
    HTTPS = "Https"


class HttpMethod(StrEnum):
    """Method of an HTTP request."""

    GET = "GET"
    HEAD = "HEAD"
    POST = "POST"
    PUT = "PUT"
    PATCH = "PATCH"
    DELETE = "DELETE"
    OPTIONS = "OPTIONS"


class EgressCredential(Model):
    """A header that hosts add to requests; environments never see it."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"!(self.header.lowerAscii() in {list(_OWN_HEADERS)})",
            holds=lambda s: s.header.lower() not in _OWN_HEADERS,
            message="this header says how a message is sent, not who sends it",
            fix="name another header, as a rule Authorization",
            field_path=".header",
        ),
    )

    header: Annotated[str, Field(pattern=HEADER, max_length=64)] = "Authorization"
    """Its name; what an environment sends under it is replaced."""
    secret_ref: NameRef
    """Secret with the header's value, mounted into the hosts."""
    key: Annotated[str, Field(pattern=DATA_KEY, max_length=253)] = "value"
    """The Secret's key that holds it, such as `Bearer …`, in one line."""


class EgressRule(Model):
    """One host that environments may reach."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.mode != 'Tunnel' || ((!has(self.methods) || size(self.methods) == 0)"
            " && (!has(self.paths) || size(self.paths) == 0))",
            holds=lambda s: s.mode is not EgressMode.TUNNEL or not (s.methods or s.paths),
            message="methods and paths inside of a tunnel cannot be seen",
            fix="set mode to Https and have clients ask for http://, or remove them",
            field_path=".mode",
        ),
        Rule(
            cel="self.mode == 'Https' || !has(self.credential)",
            holds=lambda s: s.mode is EgressMode.HTTPS or s.credential is None,
            message="a credential needs a request that the host can read and then encrypts",
            fix="set mode to Https, or remove credential",
            field_path=".mode",
        ),
    )

    name: Name
    """Name that templates and logs use."""
    host: Annotated[str, Field(max_length=253, pattern=HOST)]
    """A host's name in lower case, or `*.` and a name for all hosts below it. Addresses, and names
    that lead to addresses which are not public, are refused whatever is listed."""
    port: Annotated[int, Field(ge=1, le=65_535)] | None = None
    """Port of the host: 443, and 80 for Http, unless set."""
    mode: EgressMode = EgressMode.TUNNEL
    """Tunnel carries the client's own TLS, as https:// through a proxy does. Http and Https carry
    requests for http://, which hosts read; with Https the environment host
    speaks TLS with the upstream."""
    methods: Annotated[tuple[HttpMethod, ...], Field(max_length=8)] = ()
    """Methods that requests may have; all if there are none. Not for Tunnel."""
    paths: Annotated[
        tuple[Annotated[str, Field(max_length=512, pattern=PATH)], ...], Field(max_length=32)
    ] = ()
    """Beginnings of paths, up to a slash, that requests may have; all if there are none. Not for
    Tunnel."""
    credential: EgressCredential | None = None
    """Header that hosts add. For Https only."""

    @property
    def effective_port(self) -> int:
        """Port of the host, also where the rule names none."""
        return self.port or (80 if self.mode is EgressMode.HTTP else 443)


PolicyManagement = Literal["Managed", "Unmanaged"]
"""Whether the operator makes NetworkPolicies: pods then reach their peers, names, the object store
and the collector, and only their callers reach them. Link-local addresses are never reached."""


class RunNetwork(Model):
    """Network policies of a run's pods."""

    policy: PolicyManagement = "Managed"
    """Managed makes a NetworkPolicy for each role; others that select its pods add to it. With
    Unmanaged there are none, and the namespace's own decide."""


class Network(Model):
    """Egress of environments; without it there is none."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="(self.egress == 'Custom') == (has(self.rules) && size(self.rules) > 0)",
            holds=lambda s: (s.egress is EgressPolicy.CUSTOM) == bool(s.listed),
            message="egress Custom needs rules, and nothing else reads them",
            fix="set egress to Custom, or remove rules",
            field_path=".rules",
        ),
    )

    egress: EgressPolicy = EgressPolicy.NONE
    """None is no network at all; Custom what rules list; Public every public host, by https:// and
    http://. Private addresses and a cloud's metadata are never reached."""
    listed: Annotated[tuple[EgressRule, ...], Field(max_length=32, alias="rules"), NAMED] = ()
    """Hosts that environments may reach; of several that fit, one that allows it counts."""
    policy: PolicyManagement = "Managed"
    """Managed makes a NetworkPolicy for brokers, hosts and the edge, where the cluster enforces
    them. With Unmanaged the namespace's own decide what these pods may reach."""
    max_mib: Annotated[int, Field(ge=1, le=1_048_576)] = 1_024
    """What one environment may send and receive together; then it reaches nothing any more."""
