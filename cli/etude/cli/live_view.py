"""Live terminal view: a picture of one run, drawn from plain values."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from etude.cli.output import console, say

BARS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PodLine:
    """One process or pod."""

    name: str
    state: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """Values that the picture shows."""

    name: str
    phase: str
    """Derived phase of the run, as in `kubectl get rlr`."""
    active_phase: str = ""
    step: int = 0
    target: int = 0
    step_seconds: float | None = None
    reward: float | None = None
    rewards: tuple[float, ...] = ()
    loss: float | None = None
    losses: tuple[float, ...] = ()
    held_out: tuple[float, ...] = ()
    greedy: tuple[float, ...] = ()
    policy_version: int = 0
    staleness_max: float = 0.0
    tokens_per_second: float = 0.0
    mismatch: float | None = None
    swap_ms: float | None = None
    in_flight: int = 0
    completed: int = 0
    masked: int = 0
    environments: str = ""
    pods: tuple[PodLine, ...] = ()
    why: str = ""
    """One sentence when the run is not progressing."""
    events: tuple[str, ...] = ()


def sparkline(values: Sequence[float], width: int = SPARK_WIDTH) -> str:
    """The values as bars, the newest on the right; many values share a bar by their mean."""
    if not values:
        return ""
    per_bar = max(1, -(-len(values) // width))
    means = [
        sum(part) / len(part)
        for part in (values[i : i + per_bar] for i in range(0, len(values), per_bar))
    ]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def draw_view(view: RunView) -> RenderableType:
    """The whole view; works from 80 columns on."""
    parts: list[RenderableType] = [_headline(view)]
    if view.why:
        parts.append(Text(view.why, style="yellow"))
    parts += [_progress(view), _facts(view), _pods(view)]
    if view.events:
        parts.append(Text("\n".join(view.events[-3:]), style="dim"))
    return Panel(
        Group(*parts), title=Text(f"etude · {view.name}"), title_align="left", padding=(0, 1)
    )


def format_view(view: RunView) -> str:
    """The facts of the view as one line for logs."""
    facts = [view.phase]
    if view.active_phase:
        facts.append(f"{view.active_phase} {view.step}/{view.target}")
    if view.rewards and view.reward is not None:
        facts.append(f"reward {view.reward:.2f}")
    elif view.loss is not None:
        facts.append(f"loss {view.loss:.3f}")
    if view.held_out:
        facts.append(f"held-out {view.held_out[-1]:.2f}")
    facts.append(f"version {view.policy_version}")
    if view.environments:
        facts.append(view.environments)
    if view.why:
        facts.append(view.why)
    return " | ".join(facts)


def _headline(view: RunView) -> Text:
    colour = {"Running": "green", "Succeeded": "green", "Failed": "red"}.get(view.phase, "yellow")
    line = Text()
    line.append(view.phase, style=f"bold {colour}")
    if view.active_phase:
        line.append(f" · {view.active_phase} {view.step}/{view.target}", style="bold")
    if view.step_seconds:
        left = max(0, view.target - view.step) * view.step_seconds
        line.append(f" · {view.step_seconds:.2g} s/step · {_duration(left)} left")
    return line


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} m {rest:02d} s" if minutes else f"{rest} s"


def _progress(view: RunView) -> RenderableType:
    return ProgressBar(total=max(1, view.target), completed=view.step, width=76)


def _facts(view: RunView) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    if view.rewards:
        table.add_row("reward", f"{view.reward or 0.0:.2f}  {sparkline(view.rewards)}")
    elif view.losses:
        table.add_row("loss", f"{view.loss or 0.0:.3f}  {sparkline(view.losses)}")
    if view.held_out:
        greedy = f"   greedy {_trend(view.greedy)}" if view.greedy else ""
        table.add_row("held-out", f"T=1 {_trend(view.held_out)}{greedy}")
    swap = f" · swap {view.swap_ms:.0f} ms" if view.swap_ms is not None else ""
    gap = f" · sampler-trainer gap {view.mismatch:.0e}" if view.mismatch is not None else ""
    stale = f" · staleness ≤ {view.staleness_max:.0f}"
    table.add_row("policy", f"version {view.policy_version}{swap}{stale}{gap}")
    table.add_row(
        "rollouts",
        f"{view.in_flight} running · {view.completed} done · {view.masked} masked"
        f" · {view.tokens_per_second:,.0f} tokens/s",
    )
    if view.environments:
        table.add_row("sandboxes", view.environments)
    return table


def _trend(values: Sequence[float]) -> str:
    return " → ".join(f"{value:.2f}" for value in values[-4:])


def _pods(view: RunView) -> Table:
    table = Table.grid(padding=(0, 2))
    for pod in view.pods:
        colour = "green" if pod.state == "Ready" else "yellow"
        table.add_row(Text("●", style=colour), pod.name, pod.state, Text(pod.detail, style="dim"))
    return table


REDRAWS_PER_SECOND = 2
PLAIN_INTERVAL_S = 10.0


class RunViewer(Protocol):
    """Source of the present view of a run."""

    def view(self) -> RunView: ...


def show_run(viewer: RunViewer, *, as_lines: bool, is_over: Callable[[], bool]) -> None:
    """Draw until the run is over, and once more after that."""
    screen = console()
    if as_lines or not screen.is_terminal:
        _show_lines(viewer, is_over)
        return
    with Live(console=screen, refresh_per_second=REDRAWS_PER_SECOND) as live:
        while not is_over():
            live.update(draw_view(viewer.view()))
            time.sleep(1 / REDRAWS_PER_SECOND)
        live.update(draw_view(viewer.view()))


def _show_lines(viewer: RunViewer, is_over: Callable[[], bool]) -> None:
    shown = ""
    last = 0.0
    while not is_over():
        line = format_view(viewer.view())
        if line != shown and time.monotonic() - last >= PLAIN_INTERVAL_S:
            say(line)
            shown, last = line, time.monotonic()
        time.sleep(0.5)
    say(format_view(viewer.view()))
