"""Page of the demo: promises, curves of rounds and windows, users of both versions, decisions."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from etude.cli.report.charts import Chart, png
from etude.cli.report.page import Fact, open_templates
from etude.cli.report.rows import Curve
from etude.common.blobs import Store, open_store
from etude.common.feedback import windows
from etude.demo.realtime.figures import RoundTruth
from etude.demo.realtime.second_act import measure_hacks
from etude.demo.realtime.summary import PlayedActs
from etude.feedback.release.records import newest_release, read_release

PAGE = "index.html"
STORES = {1: "act-1/run", 2: "act-2/run", 3: "act-3/route"}
"""Folders of the acts' stores below that of a demo."""


class ShownDecision(NamedTuple):
    """One line of an act's table of decisions."""

    after: str
    """Seconds since the act's first decision."""
    action: str
    sentence: str
    evidence: str
    """First digits of the digest."""


class ShownAct(NamedTuple):
    """The decisions of one act."""

    number: int
    decisions: Sequence[ShownDecision]


def write_page(folder: Path, acts: PlayedActs, total_s: float) -> Path:
    """Write the page and its pictures into the folder of a demo that has ended.

    Args:
        folder: with the folders of the acts.
        acts: that were played.
        total_s: time that they took.

    Raises:
        CorruptError: a decision or a window in a store is damaged.
        OSError: the folder cannot be written.
    """
    stores = {
        number: open_store((folder / place).resolve().as_uri())
        for number, place in STORES.items()
        if (folder / place).is_dir()
    }
    charts = _collect_charts(stores, acts)
    for chart in charts:
        (folder / f"{chart.name}.png").write_bytes(png(chart))
    templates = open_templates("etude.demo.realtime", "etude.cli.report")
    third = acts.third
    text = templates.get_template("realtime.html.j2").render(
        name=folder.name,
        lead=f"real-time demo, {total_s:.0f} s",
        facts=collect_facts(acts),
        checks=acts.checks,
        pictures=[{"file": f"{chart.name}.png", "title": chart.title} for chart in charts],
        arms=[
            {"name": arm.name, "visits": arm.num_visits, "complaints": f"{arm.complaints:.3f}"}
            for arm in (third.arms if third else ())
        ],
        acts=[ShownAct(number, read_decisions(store)) for number, store in stores.items()],
    )
    page = folder / PAGE
    page.write_text(text, encoding="utf-8")
    return page


def collect_facts(acts: PlayedActs) -> list[Fact]:
    """The figures in the head of the page."""
    facts: list[Fact] = []
    if acts.first is not None:
        for label, change in (
            ("persistence", acts.first.persistence),
            ("complaints", acts.first.complaints),
        ):
            facts.append(Fact(label, f"{change.before:.2f} → {change.after:.2f}"))
    if acts.second is not None:
        before, peak, after = acts.second.before, acts.second.peak, acts.second.after
        for place, label in enumerate(("questions", "broken calls")):
            course = " → ".join(f"{each[place]:.0%}" for each in (before, peak, after))
            facts.append(Fact(label, course))
    if acts.third is not None and acts.third.rollback_s is not None:
        facts.append(Fact("rolled back within", f"{acts.third.rollback_s:.1f} s"))
    requests, failed, retried = acts.count_requests()
    return [*facts, Fact("requests, failed, retried", f"{requests:,}, {failed}, {retried}")]


def _collect_charts(stores: dict[int, Store], acts: PlayedActs) -> list[Chart]:
    charts = []
    if acts.first is not None:
        charts.append(chart_rounds(acts.first.rounds))
    charts += [
        chart_hacks(f"hacks-{number}", f"Do hacks win? Act {number}", stores[number])
        for number in (1, 2)
        if number in stores
    ]
    return [chart for chart in charts if any(curve.x for curve in chart.curves)]


def chart_rounds(rounds: Sequence[RoundTruth]) -> Chart:
    """Persistence and complaints over the rounds of visits."""
    return Chart(
        name="rounds",
        title="Are users served better?",
        unit="share",
        axis="round of visits",
        curves=(
            _curve("persistence", enumerate((each.persistence for each in rounds), 1)),
            _curve("complaints", enumerate((each.complaints for each in rounds), 1)),
        ),
    )


def chart_hacks(name: str, title: str, store: Store) -> Chart:
    """Rates of the two hacks over the windows of a store."""
    found = [windows.read_window(store, number) for number in windows.list_windows(store)]
    rates = [(each.number, measure_hacks(each)) for each in found if each.rollouts]
    return Chart(
        name=name,
        title=title,
        unit="share",
        axis="window",
        curves=(
            _curve("rollouts that end with a question", ((x, y.questions) for x, y in rates)),
            _curve("tool calls that are broken", ((x, y.broken_calls) for x, y in rates)),
        ),
    )


def _curve(label: str, points: Iterable[tuple[int, float]]) -> Curve:
    listed = [*points]
    return Curve(label=label, x=tuple(x for x, _ in listed), y=tuple(y for _, y in listed))


def read_decisions(store: Store) -> list[ShownDecision]:
    """Read the decisions of a route, from the first to the newest.

    Raises:
        CorruptError: one is damaged.
    """
    newest = newest_release(store)
    records = [
        read_release(store, number) for number in range(1, newest.number + 1 if newest else 1)
    ]
    return [
        ShownDecision(
            f"{(each.decided_ms - records[0].decided_ms) / 1_000:.1f} s",
            each.action,
            each.sentence,
            each.evidence[:12],
        )
        for each in records
    ]
