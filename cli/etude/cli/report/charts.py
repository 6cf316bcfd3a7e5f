"""Curves as PNG pictures."""

import io
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib as mpl

mpl.use("Agg")

from matplotlib.figure import Figure

from etude.cli.report.rows import Curve, Row, curve, evaluations, steps

COLOURS = ("#2a6f97", "#e07a5f", "#3d8361", "#8d6a9f", "#b08900")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One picture: a question, its curves, its axes."""

    name: str
    title: str
    unit: str
    curves: tuple[Curve, ...]
    axis: str = "step"
    """Of the points' order."""


def charts(rows: Sequence[Row]) -> list[Chart]:
    """The pictures that a run's rows can fill."""
    rl, supervised, evals = steps(rows, rl=True), steps(rows, rl=False), evaluations(rows)
    wanted = [
        *_policy_charts(rl, supervised, evals),
        *_behaviour_charts(rl),
        *_system_charts(rl),
    ]
    wanted.append(
        Chart(
            name="mtp",
            title="Does the head guess the policy's next token but one?",
            unit="share of positions",
            curves=(
                curve(rl, "mtp_agreement", "sampled phases"),
                curve(supervised, "mtp_agreement", "supervised phases"),
            ),
        )
    )
    return [chart for chart in wanted if any(c.x for c in chart.curves)]


def _policy_charts(
    rl: Sequence[Row], supervised: Sequence[Row], evals: Sequence[Row]
) -> list[Chart]:
    """Charts of what the policy learns."""
    return [
        Chart(
            name="reward",
            title="Is it getting better?",
            unit="share, reward",
            curves=(
                curve(rl, "reward_mean", "training reward"),
                curve(rl, "success_mean", "training success"),
                curve(evals, "success", "held-out, T = 1", as_points=True),
                curve(evals, "greedy_success", "held-out, greedy", as_points=True),
            ),
        ),
        Chart(
            name="warm-up",
            title="Supervised loss",
            unit="nats a token",
            curves=(curve(supervised, "loss", "loss"),),
        ),
        Chart(
            name="length",
            title="How long does it work?",
            unit="tokens, turns",
            curves=(
                curve(rl, "length_mean", "tokens a rollout"),
                curve(rl, "turns_mean", "turns a rollout"),
            ),
        ),
        Chart(
            name="entropy",
            title="Does it still explore?",
            unit="nats a token",
            curves=(curve(rl, "entropy", "entropy"),),
        ),
    ]


def _behaviour_charts(rl: Sequence[Row]) -> list[Chart]:
    """Charts of how the policy works with its tools."""
    kinds = ("thinking", "call", "final_message", "summary", "tool_output")
    return [
        Chart(
            name="looks",
            title="Does it look before it edits, and call tools in parallel?",
            unit="calls",
            curves=(
                curve(rl, "calls_per_turn", "calls a turn with calls"),
                curve(rl, "looks_before_edit", "reads and searches before the first edit"),
            ),
        ),
        Chart(
            name="edits",
            title="Does it edit, and do its calls succeed?",
            unit="share",
            curves=(
                curve(rl, "edit_rate", "rollouts with an edit"),
                curve(rl, "tool_error_rate", "calls with an error"),
            ),
        ),
        Chart(
            name="tokens",
            title="Where do tokens go?",
            unit="tokens of a step",
            curves=tuple(curve(rl, f"{kind}_tokens", kind.replace("_", " ")) for kind in kinds),
        ),
    ]


def _system_charts(rl: Sequence[Row]) -> list[Chart]:
    """Charts of how sampler and trainer work together."""
    return [
        Chart(
            name="staleness",
            title="How old are trained tokens?",
            unit="versions",
            curves=(
                curve(rl, "staleness_p50", "median"),
                curve(rl, "staleness_max", "largest"),
            ),
        ),
        Chart(
            name="mismatch",
            title="Do sampler and trainer agree?",
            unit="nats",
            curves=(
                curve(rl, "mismatch_mean", "mean gap of log-probs"),
                curve(rl, "mismatch_max", "largest gap"),
            ),
        ),
        Chart(
            name="time",
            title="Where does a step's time go?",
            unit="seconds",
            curves=(
                curve(rl, "rollout_seconds", "rollouts"),
                curve(rl, "update_seconds", "update"),
                curve(rl, "publish_seconds", "publish and swap"),
            ),
        ),
    ]


def png(chart: Chart) -> bytes:
    """The chart as a PNG picture, 1,440 x 720 pixels."""
    figure = Figure(figsize=(9.6, 4.8), dpi=150, layout="constrained")
    axes = figure.subplots()
    for colour, one in zip(COLOURS, [c for c in chart.curves if c.x], strict=False):
        style = "o--" if one.as_points else "-"
        axes.plot(one.x, one.y, style, color=colour, label=one.label, linewidth=1.8, markersize=5)
    axes.set_title(chart.title, loc="left", fontsize=13)
    axes.set_xlabel(chart.axis)
    axes.set_ylabel(chart.unit)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
