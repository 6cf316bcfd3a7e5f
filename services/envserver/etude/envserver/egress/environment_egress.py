"""Egress of one environment: its rules, its limits, its log of attempts."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from etude.common.api.pool.network import EgressMode, EgressPolicy, EgressRule, Network
from etude.envserver import metrics
from etude.envserver.egress.credentials import SecretFiles
from etude.envserver.egress.limits import MAX_CONNECTIONS, EgressAccount
from etude.envserver.egress.policy import AllowRule, EgressVerdict
from etude.envserver.egress.upstream import HostLookups, Upstream

log = logging.getLogger(__name__)

_MAX_LOGGED = 255
_PUBLIC = (
    AllowRule(name="public-tunnel", host="*"),
    AllowRule(name="public-http", host="*", port=80, mode=EgressMode.HTTP),
)


@dataclass(slots=True, kw_only=True)
class EgressAttempt:
    """One attempt to connect, from the first byte to the last."""

    method: str = ""
    host: str = ""
    port: int = 0
    verdict: EgressVerdict = EgressVerdict.MALFORMED
    rule: str = ""
    why: str = ""
    sent_bytes: int = 0
    received_bytes: int = 0
    began_s: float = field(default_factory=time.monotonic)


@dataclass(slots=True, eq=False, weakref_slot=True)
class EnvironmentEgress:
    """The egress of one environment."""

    lease_id: str
    rules: Sequence[AllowRule]
    upstream: Upstream
    secrets: SecretFiles
    account: EgressAccount
    connection_slots: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(MAX_CONNECTIONS)
    )
    lookups: HostLookups = field(default_factory=HostLookups)
    _in_use: dict["asyncio.Task[object]", AllowRule] = field(default_factory=dict)
    """Rule by which each open connection is allowed."""

    @contextlib.contextmanager
    def using(self, rule: AllowRule) -> Iterator[None]:
        """Hold the current task's connection open under a rule, until that is revoked."""
        task = asyncio.current_task()
        assert task is not None, "connections are served by tasks"  # noqa: S101 - our own mistake
        self._in_use[task] = rule
        try:
            yield
        finally:
            self._in_use.pop(task, None)

    def replace_rules(self, rules: Sequence[AllowRule]) -> int:
        """Apply newer rules; returns how many connections were cut for it.

        A connection stays as long as the very rule that allowed it does.
        """
        self.rules = rules
        revoked = [task for task, rule in self._in_use.items() if rule not in rules]
        for task in revoked:
            task.cancel("its rule was revoked")
        return len(revoked)

    def count(self, attempt: EgressAttempt, *, sent: int = 0, received: int = 0) -> None:
        """Count bytes before they are passed on.

        Raises:
            OverLimitError: the environment has used up its bytes.
        """
        attempt.sent_bytes += sent
        attempt.received_bytes += received
        metrics.egress_bytes.labels("sent").inc(sent)
        metrics.egress_bytes.labels("received").inc(received)
        self.account.count_bytes(sent + received)

    def log_attempt(self, attempt: EgressAttempt) -> None:
        """Log a finished attempt, its host name escaped: it comes from the environment."""
        metrics.egress_attempts.labels(attempt.verdict.value).inc()
        log.info(
            "egress lease=%s verdict=%s rule=%s method=%s host=%s port=%d sent=%d received=%d"
            " seconds=%.3f%s",
            self.lease_id,
            attempt.verdict.value,
            attempt.rule or "-",
            _plain(attempt.method),
            _plain(attempt.host),
            attempt.port,
            attempt.sent_bytes,
            attempt.received_bytes,
            time.monotonic() - attempt.began_s,
            f" why={attempt.why[:_MAX_LOGGED]!r}" if attempt.why else "",
        )


@dataclass(slots=True)
class PoolEgress:
    """The egress settings of a pool, for its new environments and those that run."""

    network: Network
    templates: Mapping[str, Sequence[str] | None]
    """By template: names of the rules that it may use; None is all."""
    upstream: Upstream = field(default_factory=Upstream)
    secrets: SecretFiles = field(default_factory=SecretFiles)
    _running: WeakKeyDictionary[EnvironmentEgress, str] = field(default_factory=WeakKeyDictionary)
    """Template of each environment."""

    def for_environment(self, template: str, lease_id: str) -> EnvironmentEgress | None:
        rules = self._rules_of(template)
        if not rules:
            return None
        account = EgressAccount(max_bytes=self.network.max_mib << 20)
        made = EnvironmentEgress(
            lease_id=lease_id,
            rules=rules,
            upstream=self.upstream,
            secrets=self.secrets,
            account=account,
        )
        self._running[made] = template
        return made

    def replace(self, network: Network, templates: Mapping[str, Sequence[str] | None]) -> int:
        """Apply newer settings to running environments too; returns how many connections were cut.

        An environment that has no egress stays without one, whatever is added.
        """
        self.network, self.templates = network, templates
        running = list(self._running.items())
        return sum(each.replace_rules(self._rules_of(template)) for each, template in running)

    def _rules_of(self, template: str) -> list[AllowRule]:
        listed = self.templates.get(template, ())
        return [rule for rule in _rules(self.network) if listed is None or rule.name in listed]


def _rules(network: Network) -> Sequence[AllowRule]:
    match network.egress:
        case EgressPolicy.NONE:
            return ()
        case EgressPolicy.PUBLIC:
            return _PUBLIC
        case EgressPolicy.CUSTOM:
            return [_rule(each) for each in network.listed]


def _rule(each: EgressRule) -> AllowRule:
    return AllowRule(
        name=each.name,
        host=each.host,
        port=each.effective_port,
        mode=each.mode,
        methods=each.methods,
        paths=each.paths,
        credential=each.credential,
    )


def _plain(text: str) -> str:
    """Escape a text into one word of a log line."""
    short = text[:_MAX_LOGGED]
    is_word = short.isascii() and short.isprintable() and not set(short) & set(" ='\"")
    return short if short and is_word else repr(short)
