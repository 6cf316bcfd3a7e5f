"""Values of the live view, from the files of a run folder."""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from etude.cli.live_view import PodLine, RunView
from etude.common.api.kinds import RLRun
from etude.common.api.run.status import EnvironmentStatus, RLRunStatus
from etude.common.run_folder.state import LocalPod, LocalState, read_state

Row = dict[str, Any]
RECENT_STEPS = 10
"""Steps behind the estimate of the time left."""


@dataclass(slots=True)
class FolderViewer:
    """Follows one run folder; each look reads only the rows that were appended since the last."""

    folder: Path
    _rows: list[Row] = field(default_factory=list, init=False)
    _offset: int = field(default=0, init=False)

    def view(self) -> RunView:
        """The present picture of the run."""
        self._read_more()
        state = read_state(self.folder)
        return build_view(self.folder.name, state, self._rows)

    def _read_more(self) -> None:
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        # A line that is still being written has no end yet: leave it for the next look.
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        self._rows += _rows(complete)


def _rows(data: bytes) -> Iterator[Row]:
    for line in data.splitlines():
        with suppress(ValueError):  # torn by a kill
            row = json.loads(line)
            if isinstance(row, dict):
                yield row


def build_view(name: str, state: LocalState | None, rows: Sequence[Row]) -> RunView:
    """The values of the view, from the runtime's state and the metrics rows."""
    status = _status(state)
    active = status.active_phase
    steps = [r for r in rows if r.get("kind") == "step" and r.get("phase") == active]
    evals = [r for r in rows if r.get("kind") == "eval"]
    versions = [r for r in rows if r.get("kind") == "version" and "swap_ms" in r]
    last = steps[-1] if steps else {}
    step = int(last.get("step", status.step.current if status.step else 0))
    rollouts = status.rollouts
    return RunView(
        name=name,
        phase=status.phase or ("Starting" if state else "Not started"),
        active_phase=active,
        step=step,
        target=status.step.target if status.step else 0,
        step_seconds=_pace(steps),
        reward=last.get("reward_mean"),
        rewards=_values(steps, "reward_mean"),
        loss=last.get("loss"),
        losses=_values(steps, "loss"),
        held_out=_values(evals, "success"),
        greedy=_values(evals, "greedy_success"),
        policy_version=max(status.policy_version, int(last.get("policy_version", 0))),
        staleness_max=float(last.get("staleness_max", 0)),
        tokens_per_second=float(last.get("tokens_per_second", 0)),
        mismatch=last.get("mismatch_mean"),
        swap_ms=versions[-1]["swap_ms"] if versions else None,
        in_flight=rollouts.in_flight if rollouts else 0,
        completed=rollouts.completed if rollouts else 0,
        masked=rollouts.masked if rollouts else 0,
        environments=" · ".join(_environment(e) for e in status.environments),
        pods=tuple(_pod(pod) for pod in state.pods) if state else (),
        why=_why(status),
        events=state.events if state else (),
    )


def _status(state: LocalState | None) -> RLRunStatus:
    if state is None:
        return RLRunStatus()
    try:
        return RLRun.model_validate(state.run).status
    except ValidationError:
        return RLRunStatus(phase="Unreadable")


def _values(rows: Sequence[Row], name: str) -> tuple[float, ...]:
    return tuple(float(r[name]) for r in rows if isinstance(r.get(name), int | float))


def _pace(steps: Sequence[Row]) -> float | None:
    recent = steps[-RECENT_STEPS:]
    if len(recent) < 2:
        return None
    return (float(recent[-1]["time_s"]) - float(recent[0]["time_s"])) / (len(recent) - 1)


def _environment(env: EnvironmentStatus) -> str:
    # A pool has no driver while its hosts are down: before its first phase and after the last one.
    wall = f", {env.isolation} isolation" if env.isolation else ""
    return f"{env.leased} leased from {env.pool} ({env.driver or 'no hosts'}{wall})"


def _pod(pod: LocalPod) -> PodLine:
    restarts = f"{pod.restarts} restarts" if pod.restarts else ""
    return PodLine(
        name=pod.name,
        state=pod.state,
        detail=" · ".join(part for part in (restarts, pod.message) if part),
    )


def _why(status: RLRunStatus) -> str:
    """The first fact that keeps the run from progressing, as a sentence."""
    for condition in status.conditions:
        if condition.type in {"Failed", "Stalled", "Degraded"} and condition.status == "True":
            return f"{condition.reason}: {condition.message}"
    for condition in status.conditions:
        positive = condition.type in {"Accepted", "RolesReady", "EnvironmentsReady", "Progressing"}
        if positive and condition.status == "False" and status.phase != "Succeeded":
            return f"waiting: {condition.message or condition.reason}"
    return ""
