"""Health of a pool's hosts: unhealthy and stuck pods, quarantine, and provisioning times."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from etude.common.api.pool.spec import Health, Quarantine
from etude.operator.manifests import Manifest, is_deleting, is_true, uid
from etude.operator.pools.autoscaling.limits import TERMINATION_S
from etude.operator.pools.autoscaling.provisioning import (
    MAX_SAMPLES,
    PRIOR,
    ProvisionTime,
    estimate_provision,
)

_OVER = {"Failed", "Succeeded"}

GRACE_S, CRASHES, RECHECK_S = 300, 5, 60
"""Defaults of spec.health."""
QUARANTINE_S = 3600.0
"""Time for which a host stays in quarantine to be looked at."""
QUARANTINE_SHARE = 10
"""One host in so many may be in quarantine, and one in any case: where all hosts are unhealthy,
their replacements would be, too."""


class UnhealthyReason(StrEnum):
    """A reason for which a host is unhealthy."""

    UNSCHEDULABLE = "Unplaced"
    UNREADY = "Unready"
    CRASHING = "Crashing"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthFindings:
    """Findings about unhealthy hosts; all names are of hosts."""

    quarantined: tuple[str, ...] = ()
    """Kept for inspection; replacements are created."""
    to_delete: tuple[str, ...] = ()
    """Deleted immediately."""
    unschedulable: tuple[str, ...] = ()
    """Unschedulable: no node takes them."""
    blocks_creation: bool = False
    """A host has been unschedulable for so long that no more are created."""
    requeue_after_s: float | None = None
    """Seconds until the findings may change; None where only an event can change them."""


@dataclass(slots=True)
class HealthMonitor:
    """Health history of one pool's hosts; it starts again with the operator."""

    _since: dict[tuple[str, UnhealthyReason], float] = field(default_factory=dict)
    """Time at which each reason was first observed, by uid."""
    _restarts: dict[str, int] = field(default_factory=dict)
    """Restarts of each host's containers when it was last ready, by uid."""
    _kept: dict[str, float] = field(default_factory=dict)
    """Start of each quarantine, by uid, oldest first."""

    def observe(self, hosts: Sequence[Manifest], health: Health, *, now_s: float) -> HealthFindings:
        """Record the present hosts and return the findings.

        Args:
            hosts: hosts of the pool.
            health: settings of the pool.
            now_s: on the monotonic clock.
        """
        there = [host for host in hosts if not is_deleting(host)]
        self._record(there, now_s)
        unwell = {uid(host) for host in there if self._is_unhealthy(host, health, now_s)}
        if health.quarantine is Quarantine.NEVER:
            given_up, kept = unwell, set[str]()
        else:
            kept = self._quarantine(there, unwell, now_s)
            given_up = {each for each in kept if now_s - self._kept[each] >= QUARANTINE_S}
        unplaced = [host for host in there if is_unschedulable(host)]
        waited = [
            now_s - self._since[uid(host), UnhealthyReason.UNSCHEDULABLE] for host in unplaced
        ]
        return HealthFindings(
            quarantined=_names(there, kept - given_up),
            to_delete=_names(there, given_up),
            unschedulable=_names(there, {uid(host) for host in unplaced}),
            blocks_creation=bool(waited) and max(waited) >= _recheck_s(health),
            requeue_after_s=self._requeue_after_s(health, now_s),
        )

    def _record(self, there: Sequence[Manifest], now_s: float) -> None:
        seen = {(uid(host), ill): host for host in there for ill in _unhealthy_reasons(host)}
        self._since = {key: self._since.get(key, now_s) for key in seen}
        living = {uid(host): host for host in there}
        self._restarts = {
            name: _restarts(host) if is_true(host, "Ready") else self._restarts.get(name, 0)
            for name, host in living.items()
        }
        self._kept = {
            name: at
            for name, at in self._kept.items()
            if name in living and not is_true(living[name], "Ready")
        }

    def _is_unhealthy(self, host: Manifest, health: Health, now_s: float) -> bool:
        name = uid(host)
        unready_s = now_s - self._since.get((name, UnhealthyReason.UNREADY), now_s)
        if unready_s >= _grace_s(health):
            return True
        crashes = _restarts(host) - self._restarts[name]
        return (name, UnhealthyReason.CRASHING) in self._since and crashes >= (
            health.crash_loop_threshold or CRASHES
        )

    def _quarantine(self, there: Sequence[Manifest], unwell: set[str], now_s: float) -> set[str]:
        room = max(1, len(there) // QUARANTINE_SHARE) - len(self._kept)
        new = [uid(host) for host in there if uid(host) in unwell and uid(host) not in self._kept]
        self._kept |= dict.fromkeys(new[: max(0, room)], now_s)
        return set(self._kept)

    def _requeue_after_s(self, health: Health, now_s: float) -> float | None:
        limits: Mapping[UnhealthyReason, float] = {
            UnhealthyReason.UNREADY: _grace_s(health),
            UnhealthyReason.UNSCHEDULABLE: _recheck_s(health),
        }
        waits = [at + limits[ill] - now_s for (_, ill), at in self._since.items() if ill in limits]
        waits += [at + QUARANTINE_S - now_s for at in self._kept.values()]
        return min((each for each in waits if each > 0), default=None)


def is_unschedulable(host: Manifest) -> bool:
    """The scheduler has found no node for the host."""
    conditions = host.get("status", {}).get("conditions") or ()
    return any(c["type"] == "PodScheduled" and c["status"] == "False" for c in conditions)


def _grace_s(health: Health) -> float:
    return health.readiness_grace_seconds or GRACE_S


def _recheck_s(health: Health) -> float:
    return health.unschedulable_recheck_seconds or RECHECK_S


def _unhealthy_reasons(host: Manifest) -> Iterator[UnhealthyReason]:
    if is_unschedulable(host):
        yield UnhealthyReason.UNSCHEDULABLE
    states = [each.get("state") or {} for each in _containers(host)]
    # While an image is pulled no container runs, however long that takes.
    if states and not is_true(host, "Ready") and all("running" in each for each in states):
        yield UnhealthyReason.UNREADY
    reasons = [(each.get("waiting") or {}).get("reason") for each in states]
    if "CrashLoopBackOff" in reasons:
        yield UnhealthyReason.CRASHING


def _restarts(host: Manifest) -> int:
    return sum(each.get("restartCount", 0) for each in _containers(host))


def _containers(host: Manifest) -> Sequence[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = host.get("status", {}).get("containerStatuses") or ()
    return found


def _names(hosts: Sequence[Manifest], uids: set[str]) -> tuple[str, ...]:
    return tuple(host["metadata"]["name"] for host in hosts if uid(host) in uids)


def _new_samples() -> deque[float | None]:
    return deque(maxlen=MAX_SAMPLES)


@dataclass(slots=True)
class ProvisionTracker:
    """Newest provisioning times of one pool."""

    prior: ProvisionTime = PRIOR
    """Assumed while samples are few: the figure of an earlier operator."""
    samples_s: deque[float | None] = field(default_factory=_new_samples)
    """Of each new host; None for one that ended before it was ready."""
    _begun: dict[str, float] = field(default_factory=dict)
    """Time at which hosts that are not ready were first observed, by uid."""
    _settled: set[str] = field(default_factory=set)
    """Uids of hosts that were measured or cannot be."""

    def observe(self, hosts: Sequence[Manifest], *, now_s: float) -> None:
        """Record the present hosts."""
        living = {uid(host) for host in hosts}
        self._begun = {name: at for name, at in self._begun.items() if name in living}
        self._settled &= living
        for host in hosts:
            if uid(host) not in self._settled:
                self._look(host, now_s)

    @property
    def estimate(self) -> ProvisionTime:
        """Quantiles of the observed times."""
        return estimate_provision(tuple(self.samples_s), self.prior)

    def _look(self, host: Manifest, now_s: float) -> None:
        name = uid(host)
        is_ready, is_over = is_true(host, "Ready"), host.get("status", {}).get("phase") in _OVER
        if is_ready or is_over or is_deleting(host):
            begun_s = self._begun.pop(name, None)
            self._settled.add(name)
            # Hosts that an earlier operator created are observed too late to be timed.
            if begun_s is not None and is_over:
                self.samples_s.append(None)
            elif begun_s is not None and is_ready:
                self.samples_s.append(now_s - begun_s)
        else:
            self._begun.setdefault(name, now_s)


@dataclass(slots=True)
class TerminatingHosts:
    """Terminating hosts of one pool, timed by the operator's own clock."""

    _since: dict[str, float] = field(default_factory=dict)
    """Time at which each was first observed as terminating, by uid."""

    def observe(self, hosts: Sequence[Manifest], *, now_s: float) -> None:
        """Record the terminating hosts."""
        leaving = [uid(host) for host in hosts if is_deleting(host)]
        self._since = {name: self._since.get(name, now_s) for name in leaving}

    def stuck_hosts(self, hosts: Sequence[Manifest], *, now_s: float) -> set[str]:
        """Uids of hosts that terminate for too long: their node does not answer."""
        return {
            uid(host)
            for host in hosts
            if now_s - self._since.get(uid(host), now_s)
            > _termination_grace_s(host) + TERMINATION_S
        }


def _termination_grace_s(host: Manifest) -> float:
    return float(host["metadata"].get("deletionGracePeriodSeconds") or 0)
