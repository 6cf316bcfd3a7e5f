"""HTML page of a run's report: facts, curves, habits, tools, versions, rollouts."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from etude.cli.report.charts import Chart
from etude.cli.report.rows import Row, evaluations, steps, versions
from etude.common.run_folder.record import RunRecord

MAX_TEXT = 8_192
"""Longest piece of one turn on the page; rollout text is not ours and may be endless."""

MAX_VERSIONS = 60
ROLLOUTS_PER_STEP = 4

HABITS = {
    "read_before_edit": "first edit comes after reading that file",
    "tests_after_edit": "tests run after the last edit",
    "edits_after_failed_test": "edits again after a failed test",
    "edit_error_rate": "edits refused by the tool",
    "malformed_per_rollout": "malformed calls a rollout",
}


class Fact(NamedTuple):
    """One figure in the head of the page."""

    label: str
    value: str


class TableRow(NamedTuple):
    """One line of a table."""

    label: str
    values: tuple[str, ...]


class Grid(NamedTuple):
    """A small table with named columns."""

    columns: tuple[str, ...]
    rows: tuple[TableRow, ...]


def open_templates(*packages: str) -> Environment:
    """Templates of some packages, which escape every value and refuse a missing one."""
    loader = ChoiceLoader([PackageLoader(package) for package in packages])
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined)


def render(name: str, record: RunRecord, rows: Sequence[Row], pictures: Sequence[Chart]) -> str:
    """The page as HTML; everything that came from a rollout is escaped."""
    return (
        open_templates("etude.cli.report")
        .get_template("page.html.j2")
        .render(
            name=name,
            lead=_lead(rows),
            facts=_facts(rows),
            pictures=[{"file": f"{chart.name}.png", "title": chart.title} for chart in pictures],
            behaviour=habits(rows),
            tools=_tools(rows),
            versions=[_version(v) for v in versions(rows)[-MAX_VERSIONS:]],
            rollouts=_rollouts(record),
        )
    )


def _lead(rows: Sequence[Row]) -> str:
    if not rows:
        return "Nothing was recorded yet."
    minutes = (float(rows[-1]["time_s"]) - float(rows[0]["time_s"])) / 60
    phases = list(dict.fromkeys(str(r["phase"]) for r in rows if r.get("kind") == "step"))
    return f"{' → '.join(phases)}, {minutes:.1f} minutes from the first row to the last"


def _facts(rows: Sequence[Row]) -> list[Fact]:
    evals, rl = evaluations(rows), steps(rows, rl=True)
    facts = []
    for label, field in (("held-out, T = 1", "success"), ("held-out, greedy", "greedy_success")):
        values = [e[field] for e in evals if isinstance(e.get(field), int | float)]
        if values:
            facts.append(Fact(label, f"{values[0]:.2f} → {values[-1]:.2f}"))
    if rl:
        facts += [
            Fact("training reward", f"{rl[0]['reward_mean']:.2f} → {rl[-1]['reward_mean']:.2f}"),
            Fact("rollouts", f"{sum(int(r.get('rollouts', 0)) for r in rl):,}"),
            Fact("masked", str(sum(int(r.get("masked", 0)) for r in rl))),
        ]
    return [*facts, Fact("policy versions", str(len(versions(rows))))]


def habits(rows: Sequence[Row]) -> Grid | None:
    """Habits of the first and the last evaluation, side by side."""
    shown = [
        (f"{mode} {when}", found)
        for evaluation, when in _ends(evaluations(rows))
        for mode, found in (evaluation.get("behaviour") or {}).items()
    ]
    if not shown:
        return None
    shown.sort(key=lambda column: column[0].split()[0])
    lines = tuple(
        TableRow(label, tuple(_share(found.get(key)) for _, found in shown))
        for key, label in HABITS.items()
    )
    return Grid(tuple(title for title, _ in shown), lines)


def _ends(evals: Sequence[Row]) -> list[tuple[Row, str]]:
    if len(evals) < 2:
        return [(e, "now") for e in evals]
    return [(evals[0], "before"), (evals[-1], "after")]


def _share(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, int | float) else "-"


def _tools(rows: Sequence[Row]) -> Grid | None:
    rl = [r for r in steps(rows, rl=True) if r.get("tools")]
    if not rl:
        return None
    ends = (rl[0], rl[-1]) if len(rl) > 1 else (rl[0],)
    names = sorted({name for row in ends for name in row["tools"]})
    lines = tuple(
        TableRow(name, tuple(str(row["tools"].get(name, 0)) for row in ends)) for name in names
    )
    return Grid(tuple(f"step {row['step']}" for row in ends), lines)


def _version(row: Row) -> dict[str, str]:
    return {
        "version": f"{row.get('epoch', '?')}.{row.get('number', '?')}",
        "step": str(row.get("step", "")),
        "bytes": f"{int(row.get('bytes', 0)):,}",
        "seconds": f"{float(row.get('seconds', 0)):.2f}",
        "pause": f"{float(row.get('swap_ms', 0)):.0f}",
    }


def _rollouts(record: RunRecord) -> list[dict[str, Any]]:
    splits = [(step, name) for step, name in record.splits() if name == "train"]
    if not splits:
        return []
    chosen = dict.fromkeys((splits[0], splits[len(splits) // 2], splits[-1]))
    return [
        _readable(step, row)
        for step, name in chosen
        for row in list(record.rollouts(step, name))[:ROLLOUTS_PER_STEP]
    ]


def _readable(step: int, row: Row) -> dict[str, Any]:
    reward = row.get("reward")
    return {
        "step": step,
        "task": str(row.get("task_id", "")),
        "reward": reward,
        "reward_text": f"{reward:.2f}" if isinstance(reward, int | float) else "masked",
        "ending": str(row.get("ending", "")).removeprefix("ENDING_").lower().replace("_", " "),
        "turns": [
            {"who": str(turn.get("role", "")), "text": str(turn.get("text", ""))[:MAX_TEXT]}
            for turn in row.get("turns", [])
        ],
    }
