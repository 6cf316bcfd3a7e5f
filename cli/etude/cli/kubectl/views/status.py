"""A run's status on one screen."""

from collections.abc import Iterator
from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from etude.cli.kubectl.diagnose.diagnosis import Diagnosis, RunState, last_line
from etude.cli.kubectl.diagnose.pods import is_ready
from etude.cli.kubectl.diagnose.run_objects import RunObjects
from etude.cli.kubectl.durations import format_ago, format_duration, parse_time
from etude.cli.kubectl.manifests import name_of
from etude.common.api.meta import Condition
from etude.common.api.run.status import RLRunStatus

NEGATIVE = {"Failed", "Stalled", "Degraded", "Suspended"}
"""Conditions that are good when they are False."""
NEUTRAL = {"Complete"}
RESTING = {"Finished", "Suspended"}
"""Reasons of a run that holds no pods on purpose."""
COLOURS = {RunState.PROGRESSES: "green", RunState.OVER: "green", RunState.FAILED: "red"}


def status_screen(seen: RunObjects, explanation: Diagnosis, now: datetime) -> RenderableType:
    """The facts about a run in a few lines, with its diagnosis."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for title, text in rows(seen, now):
        table.add_row(title, Text(text))
    colour = COLOURS.get(explanation.state, "yellow")
    return Group(
        Text(headline(seen), style="bold"), table, Text(explanation.sentence, style=colour)
    )


def headline(seen: RunObjects) -> str:
    """Namespace, name and phase of a run."""
    status = seen.status
    parts = [f"{seen.run['metadata']['namespace']}/{seen.name}", status.phase or "not looked at"]
    if status.active_phase and status.step is not None:
        parts.append(f"{status.active_phase} {status.step.text}")
    if status.attempt:
        parts.append(f"attempt {status.attempt}")
    return " · ".join(parts)


def rows(seen: RunObjects, now: datetime) -> Iterator[tuple[str, str]]:
    """The known facts, each with its title."""
    status = seen.status
    found = (
        ("phases", _phases(status)),
        ("step", _step(status, now)),
        ("reward", _reward(status)),
        ("policy", _policy(status)),
        ("rollouts", _rollouts(status)),
        ("roles", " · ".join(f"{r.name} {r.ready}/{r.desired}" for r in status.roles)),
        ("pods", _pods(seen)),
        ("environments", _environments(status)),
        ("checkpoint", _checkpoint(status, now)),
        ("time", _time(status, now)),
        ("failures", _failures(status, now)),
    )
    yield from ((title, text) for title, text in found if text)
    told = set()
    for condition in status.conditions:
        text = _condition(condition)
        if not is_good(condition) and condition.message not in told:
            yield "condition", text
        told.add(condition.message or text)


def is_good(condition: Condition) -> bool:
    """True if a condition reports nothing wrong."""
    if condition.type in NEUTRAL or condition.reason in RESTING:
        return True
    return condition.status == ("False" if condition.type in NEGATIVE else "True")


def _condition(condition: Condition) -> str:
    told = f": {last_line(condition.message)}" if condition.message else ""
    return f"{condition.type} is {condition.status}, {condition.reason}{told}"


def _phases(status: RLRunStatus) -> str:
    """Phases with their gates; a single phase without a gate is left out."""
    if len(status.phases) < 2 and not any(phase.gate for phase in status.phases):
        return ""
    gates = {"Met": ", gate met", "NotMet": ", gate not met", "Pending": "", None: ""}
    return " · ".join(
        f"{phase.name} {phase.state.lower()}{gates[phase.gate]}" for phase in status.phases
    )


def _step(status: RLRunStatus, now: datetime) -> str:
    if status.step is None:
        return ""
    last = (
        f", the last one {format_ago(status.last_step_time, now)}" if status.last_step_time else ""
    )
    return f"{status.step.current} of {status.step.target}{last}"


def _reward(status: RLRunStatus) -> str:
    parts = []
    if status.reward is not None:
        parts.append(f"{status.reward.mean} in the last step, {status.reward.ewma} smoothed")
    if status.eval_success is not None:
        parts.append(f"held-out {status.eval_success}")
    return " · ".join(parts)


def _policy(status: RLRunStatus) -> str:
    parts = [f"version {status.policy_version}"]
    if status.staleness is not None:
        parts.append(f"staleness p50 {status.staleness.p50}, max {status.staleness.max}")
    if status.tokens_per_second is not None:
        parts.append(f"{status.tokens_per_second} tokens/s")
    return " · ".join(parts)


def _rollouts(status: RLRunStatus) -> str:
    counts = status.rollouts
    if counts is None or not (counts.completed or counts.in_flight):
        return ""
    return (
        f"{counts.in_flight} running · {counts.trained} trained · {counts.masked} masked"
        f" · {counts.dropped} dropped"
    )


def _pods(seen: RunObjects) -> str:
    missing = sorted(name_of(pod) for pod in seen.pods if not is_ready(pod))
    if not seen.pods:
        return ""
    ready = f"{len(seen.pods) - len(missing)} of {len(seen.pods)} ready"
    return f"{ready}; not {', '.join(missing[:6])}" if missing else ready


def _environments(status: RLRunStatus) -> str:
    return " · ".join(
        f"{each.name}: {each.leased} leased from {each.pool}"
        f" ({each.driver or 'no hosts'}{', not available' if not each.ready else ''})"
        for each in status.environments
    )


def _checkpoint(status: RLRunStatus, now: datetime) -> str:
    newest = status.last_checkpoint
    return (
        ""
        if newest is None
        else f"{newest.name} · step {newest.step} · {format_ago(newest.time, now)}"
    )


def _time(status: RLRunStatus, now: datetime) -> str:
    held = status.active.seconds
    if status.active.since is not None:
        held += (now - parse_time(status.active.since)).total_seconds()
    ettr = f" · ETTR {100 * float(status.ettr):.0f} %" if status.ettr is not None else ""
    return f"{format_duration(held)} with pods{ettr}" if held else ""


def _failures(status: RLRunStatus, now: datetime) -> str:
    last = status.last_failure
    if last is None:
        return ""
    code = "" if last.exit_code is None else f" with exit code {last.exit_code}"
    who = last.pod or last.role
    return f"{status.restarts.total} restarts · {who} ended{code} {format_ago(last.time, now)}"
