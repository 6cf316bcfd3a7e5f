"""Status writer: writes changed statuses, with debounce and a token bucket per object."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from etude.common.api.status_types import StatusModel
from etude.common.token_bucket import TokenBucket
from etude.operator.clock import Clock
from etude.operator.controller.event_recorder import EventRecorder, status_events
from etude.operator.kube.interface import Cluster
from etude.operator.manifests import Manifest, uid

FIGURE_FIELDS = {
    *("step", "reward", "evalSuccess", "policyVersion", "staleness", "tokensPerSecond", "ettr"),
    *("rollouts", "lastStepTime", "reported", "slots", "leases", "usage"),
    *("autoscaler", "provision"),
}
"""Fields that change all the time; a change of any other field is written immediately."""

STATUSES_PER_S = 1.0
"""Sustained status writes of one object."""
STATUS_BURST = 60.0
"""Status writes of one object in a burst: enough for a whole life of a run."""


class StatusDebounce(NamedTuple):
    """Debounce times of status writes, in seconds."""

    figures_s: float = 5.0
    """Least time between two writes of one object that only change figures."""
    transient_s: float = 0.0
    """Time for which a transient status must have differed from the written one, to be written."""


@dataclass(slots=True)
class StatusWriter:
    """Writes the statuses of all objects, and records Events of their changes."""

    cluster: Cluster
    clock: Clock
    events: EventRecorder
    debounce: StatusDebounce = field(default_factory=StatusDebounce)
    _states: "dict[str, _WriteState]" = field(default_factory=dict)
    """By uid."""

    async def write(
        self, seen: Manifest, status: StatusModel, *, is_transient: bool = False
    ) -> float | None:
        """Write a status that differs; returns the delay in seconds of a write that was held back.

        Args:
            seen: the object as it was observed.
            status: its new status.
            is_transient: whether the status is transient and may be superseded before.

        Raises:
            ConflictError: the object has changed since it was observed.
        """
        known = type(status).parse_known_fields(seen.get("status", {}))
        before, after = known.to_json(), status.to_json()
        now = self.clock.monotonic_s()
        state = self._state_of(seen, now)
        if after == before:
            state.differs_s = None
            return None
        state.tokens = state.tokens.refill(now)
        wait_s = state.tokens.wait_s()
        if is_transient:
            state.differs_s = now if state.differs_s is None else state.differs_s
            wait_s = max(wait_s, state.differs_s + self.debounce.transient_s - now)
        if _without_figures(after) == _without_figures(before):
            wait_s = max(wait_s, state.written_s + self.debounce.figures_s - now)
        if wait_s > 0:
            return wait_s
        await self.cluster.replace_status(seen, after)
        state.tokens = state.tokens.take()
        state.written_s, state.differs_s = now, None
        for event in status_events(known, status):
            await self.events.record(seen, event)
        return None

    def forget(self, gone_uid: str) -> None:
        self._states.pop(gone_uid, None)
        self.events.forget(gone_uid)

    def _state_of(self, seen: Manifest, now_s: float) -> "_WriteState":
        full = TokenBucket.full(STATUSES_PER_S, STATUS_BURST, at_s=now_s)
        return self._states.setdefault(uid(seen), _WriteState(full))


@dataclass(slots=True)
class _WriteState:
    """Rate limit and debounce of one object's status."""

    tokens: TokenBucket
    written_s: float = float("-inf")
    """Time of the last status write."""
    differs_s: float | None = None
    """Since when the written status differs, if only by a transient one."""


def _without_figures(status: Mapping[str, Any]) -> dict[str, Any]:
    lasting = {key: value for key, value in status.items() if key not in FIGURE_FIELDS}
    lasting["environments"] = [
        {key: value for key, value in item.items() if key != "leased"}
        for item in status.get("environments", ())
    ]
    lasting["phases"] = [
        {key: value for key, value in item.items() if key != "step"}
        for item in status.get("phases", ())
    ]
    return lasting
