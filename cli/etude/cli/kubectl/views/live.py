"""Live view of a run of a cluster, from its status since the watch began."""

import time
from dataclasses import dataclass, field, replace
from datetime import datetime

from typing_extensions import override

from etude.cli.folder_view import Row, build_view
from etude.cli.kubectl.client import Kubectl
from etude.cli.kubectl.diagnose.diagnosis import Diagnosis, RunState
from etude.cli.kubectl.diagnose.pods import containers, is_ready
from etude.cli.kubectl.diagnose.run_objects import ROLE, RunObjects, observe_run
from etude.cli.kubectl.diagnose.why import diagnose, utc_now
from etude.cli.kubectl.durations import parse_time
from etude.cli.kubectl.manifests import (
    Manifest,
    event_time,
    events_about,
    is_terminating,
    labels_of,
    name_of,
)
from etude.cli.live_view import RunView, RunViewer
from etude.common.api.run.status import RLRunStatus
from etude.common.errors import UserError
from etude.common.run_folder.state import LocalPod, LocalState

ENDS = {RunState.OVER, RunState.FAILED}
SHOWN_EVENTS = 3


@dataclass(slots=True)
class ClusterViewer(RunViewer):
    """Reads the run every few seconds and keeps the curve of its rows."""

    kubectl: Kubectl
    run: str
    interval_s: float
    _rows: list[Row] = field(default_factory=list, init=False)
    _view: RunView | None = field(default=None, init=False)
    _next_look_s: float = field(default=0.0, init=False)
    _is_over: bool = field(default=False, init=False)
    _told: set[str] = field(default_factory=set, init=False)
    """Notes about kinds that may not be listed, each printed once."""

    @override
    def view(self) -> RunView:
        """The newest view; the last one with the error in it while the API server does not answer.

        Raises:
            UserError: the first look fails.
        """
        if self._view is None or time.monotonic() >= self._next_look_s:
            self._view = self._observe()
            self._next_look_s = time.monotonic() + self.interval_s
        return self._view

    def is_over(self) -> bool:
        """True once the run has ended or was deleted."""
        return self._is_over

    def _observe(self) -> RunView:
        try:
            seen = observe_run(self.kubectl, self.run, self._told)
        except UserError as error:
            if self._view is None:
                raise
            self._is_over = error.problem.reason == "NotFound"
            return replace(self._view, why=error.problem.what)
        at = utc_now()
        explanation = diagnose(seen, at)
        self._is_over = explanation.state in ENDS
        self._rows += new_rows(seen.status, self._rows, at)
        return cluster_view(seen, explanation, self._rows)


def new_rows(status: RLRunStatus, known: list[Row], at: datetime) -> list[Row]:
    """New rows of the curve from a status: one for a new step, one for a new evaluation."""
    found: list[Row] = []
    step = status.step
    if step is not None and status.last_step_time is not None:
        row: Row = {
            "kind": "step",
            "phase": status.active_phase,
            "step": step.current,
            "time_s": parse_time(status.last_step_time).timestamp(),
            "policy_version": status.policy_version,
            "tokens_per_second": float(status.tokens_per_second or 0),
            "staleness_max": status.staleness.max if status.staleness is not None else 0,
        }
        if status.reward is not None:
            row["reward_mean"] = float(status.reward.mean)
        found.append(row)
    if status.eval_success is not None:
        success = float(status.eval_success)
        found.append({"kind": "eval", "success": success, "time_s": at.timestamp()})
    return [row for row in found if _key(row) not in {_key(each) for each in known}]


def _key(row: Row) -> tuple[object, ...]:
    return (row["kind"], row.get("phase"), row.get("step"), row.get("success"))


def cluster_view(seen: RunObjects, explanation: Diagnosis, rows: list[Row]) -> RunView:
    """The values of the live view for a run of a cluster."""
    state = LocalState(
        pid=0,
        updated_unix_ms=0,
        run=dict(seen.run),
        pods=tuple(_pod(pod) for pod in sorted(seen.pods, key=name_of)),
        events=tuple(map(_event, events_about(seen.run, seen.events)[-SHOWN_EVENTS:])),
    )
    shown = build_view(seen.name, state, rows)
    why = "" if explanation.state == RunState.PROGRESSES else explanation.sentence
    return replace(shown, why=why)


def _pod(pod: Manifest) -> LocalPod:
    state = "Ready" if is_ready(pod) else pod.get("status", {}).get("phase", "Pending")
    return LocalPod(
        name=name_of(pod),
        role=labels_of(pod).get(ROLE, ""),
        state="Leaving" if is_terminating(pod) else state,
        restarts=sum(int(each.get("restartCount", 0)) for each in containers(pod)),
        message=pod["spec"].get("nodeName", ""),
    )


def _event(event: Manifest) -> str:
    return f"{event_time(event)[11:19]} {event.get('reason')}: {event.get('message')}"
