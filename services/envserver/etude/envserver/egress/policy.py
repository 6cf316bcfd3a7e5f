"""Egress policy: a pure decision on a request, from the rules of a pool."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from etude.common.api.pool.network import EgressCredential, EgressMode

_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})+")
_NUMERIC = re.compile(r"\d+|0x[0-9a-f]*")
"""A last label that system libraries parse as part of an address: 127.1, 0x7f000001, 1.2.3.4."""
_MAX_NAME = 253
_MAX_PORT = 65_535
_DOUBTFUL = re.compile(
    r"%(?![2-7][0-9a-f])|%(25|2e|2f|3b|5c|7f)|\\|//|/\.\.|/\.(/|;|$)", re.IGNORECASE
)
"""Paths that some servers resolve to another one: a second decoding, parameters of a segment
(`..;`), long forms of a dot in UTF-8, and anything that is not printable ASCII."""
METADATA_NAMES = frozenset(
    {
        *("metadata.google.internal", "metadata.goog", "metadata.azure.internal"),
        *("instance-data.ec2.internal", "instance-data", "metadata.platformequinix.com"),
    }
)
"""Names of the services that give VMs of a cloud their credentials."""


class EgressVerdict(StrEnum):
    """Verdict on an attempt, as in logs and metrics."""

    ALLOWED = "allowed"
    NOT_LISTED = "not_listed"
    """No rule names host and port."""
    WRONG_MODE = "wrong_mode"
    """Its rule wants requests that can be read, or a tunnel."""
    METHOD = "method"
    PATH = "path"
    ADDRESS = "address"
    """The host is an address, or resolves to one that is not public."""
    MALFORMED = "malformed"
    NOT_TLS = "not_tls"
    """A tunnel that does not begin with TLS for the host it was opened to."""
    LIMIT = "limit"
    """Too many names or bytes. Connections and attempts beyond theirs wait."""
    UNREACHABLE = "unreachable"
    CREDENTIAL = "credential"
    """The credential cannot be read, or the server sent it back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowRule:
    """One host, or all hosts below one name, that an environment may reach."""

    name: str
    host: str
    """Exact, or `*.` and a suffix, or `*` for every public host."""
    port: int = 443
    mode: EgressMode = EgressMode.TUNNEL
    methods: tuple[str, ...] = ()
    """All, if there are none."""
    paths: tuple[str, ...] = ()
    """Prefixes, whole segments of them; all, if there are none."""
    credential: EgressCredential | None = None

    @property
    def is_limited(self) -> bool:
        """True if it restricts more than the host of requests."""
        return bool(self.methods or self.paths) or self.credential is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressRequest:
    """A request of an environment to its proxy."""

    host: str
    """As it was written."""
    port: int
    method: str
    """CONNECT opens a tunnel."""
    path: str = ""

    @property
    def is_tunnel(self) -> bool:
        """True for CONNECT: bytes that the proxy passes unread."""
        return self.method == "CONNECT"


class EgressDecision(NamedTuple):
    """A verdict, and the rule behind it where there is one."""

    verdict: EgressVerdict
    rule: AllowRule | None = None
    host: str = ""
    """Canonical, if it is a name."""


def canonical_host(host: str) -> str | None:
    """Canonical spelling of a host's name; None for anything else, addresses above all."""
    name = host.lower().removesuffix(".")
    if len(name) > _MAX_NAME or not _NAME.fullmatch(name):
        return None
    return None if _NUMERIC.fullmatch(name.rpartition(".")[2]) else name


def decide(rules: Sequence[AllowRule], attempt: EgressRequest) -> EgressDecision:
    """Decide on an attempt: allowed by the first rule that allows it, else refused."""
    host = canonical_host(attempt.host)
    if host is None or not 0 < attempt.port <= _MAX_PORT:
        return EgressDecision(EgressVerdict.ADDRESS)
    if host in METADATA_NAMES:
        return EgressDecision(EgressVerdict.ADDRESS, None, host)
    nearest = EgressDecision(EgressVerdict.NOT_LISTED, None, host)
    for rule in rules:
        if not _rule_names(rule, host, attempt):
            continue
        verdict = _verdict(rule, attempt)
        nearest = EgressDecision(verdict, rule, host)
        if verdict is EgressVerdict.ALLOWED:
            break
    return nearest


def _rule_names(rule: AllowRule, host: str, attempt: EgressRequest) -> bool:
    ports = {rule.port}
    if rule.mode is EgressMode.HTTPS and not attempt.is_tunnel:
        # http://host/ is what a client writes when the proxy speaks TLS on its behalf.
        ports.add(80)
    if attempt.port not in ports:
        return False
    if rule.host == "*":
        return True
    if rule.host.startswith("*."):
        return host.endswith(rule.host[1:]) and len(host) > len(rule.host) - 1
    return host == rule.host


def _verdict(rule: AllowRule, attempt: EgressRequest) -> EgressVerdict:
    if attempt.is_tunnel is not (rule.mode is EgressMode.TUNNEL):
        return EgressVerdict.WRONG_MODE
    if rule.methods and attempt.method not in rule.methods:
        return EgressVerdict.METHOD
    if rule.paths and not _is_below(rule.paths, attempt.path):
        return EgressVerdict.PATH
    return EgressVerdict.ALLOWED


def _is_below(prefixes: Sequence[str], path: str) -> bool:
    plain = path.partition("?")[0]
    if _DOUBTFUL.search(plain):
        return False
    return any(
        plain == prefix or plain.startswith(prefix if prefix.endswith("/") else f"{prefix}/")
        for prefix in prefixes
    )
