"""Rules and dashboards ask for series that exist, and lead to a runbook that does."""

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import promql_parser
import pytest
import yaml
from tests.support.chart.helm import CHART, NAMESPACE, ROOT, SERVED, Rendered, refusal, rendered

BOARDS = sorted((CHART / "files" / "dashboards").glob("*.json"))
ALERTS: list[dict[str, Any]] = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
SCRAPED = {"namespace", "pod"}
"""Labels that every target has."""
OF_RUN = SCRAPED | {"run", "role"}
OF_ROUTE = SCRAPED | {"route", "role"}
OF_EVALUATION = SCRAPED | {"evaluation", "role"}
FROM_PODS = {
    "Operator": SCRAPED,
    "Trainer": OF_RUN,
    "Inference": OF_RUN | OF_ROUTE | OF_EVALUATION,
    "Rewards": OF_RUN | OF_EVALUATION,
    "Gateway": OF_ROUTE,
    "Feedback": OF_ROUTE,
    "Environments: broker and nodes": OF_RUN | {"pool"},
    "Every part: certificates": OF_RUN | {"pool", "route", "evaluation"},
}
"""Likewise with those that our PodMonitors take from the pods' own."""
ENDINGS = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}


class Use(NamedTuple):
    """A series in a query, with the labels that are asked of it."""

    series: str
    labels: frozenset[str]
    wanted: frozenset[str]
    """Values that a label must have to be found."""


def known() -> dict[str, set[str]]:
    """Labels of every series, from the metrics reference."""
    found: dict[str, set[str]] = {}
    part = ""
    for line in (ROOT / "docs" / "reference" / "metrics.md").read_text().splitlines():
        part = line.removeprefix("## ") if line.startswith("## ") else part
        if match := re.match(r"\| `(\w+)` \| (\w+) \| ([^|]*) \|", line):
            own = set(re.findall(r"`(\w+)`", match[3])) | FROM_PODS[part]
            for ending in ENDINGS[match[2]]:
                found[match[1] + ending] = own | ({"le"} if ending == "_bucket" else set())
    return found


def uses(node: Any, grouped: frozenset[str] = frozenset()) -> Iterator[Use]:
    """Every series below a node of a query."""
    modifier = getattr(node, "modifier", None)
    if modifier is not None and isinstance(node, promql_parser.AggregateExpr):
        grouped |= frozenset(modifier.labels)
    if isinstance(node, promql_parser.VectorSelector):
        assert node.name, "a selector without a series"
        matchers = node.matchers.matchers
        values = {each.value for each in matchers if "EQUAL" in str(each.op).upper()}
        yield Use(node.name, grouped | {each.name for each in matchers}, frozenset(values))
    for name in ("expr", "lhs", "rhs", "args", "vector_selector", "param"):
        below = getattr(node, name, None)
        for each in below if isinstance(below, list) else [below]:
            if each is not None:
                yield from uses(each, grouped)


def queries() -> list[tuple[str, str]]:
    """Every query that the chart ships, with a name for it."""
    found = [(alert["alert"], alert["expr"]) for alert in ALERTS]
    for board in BOARDS:
        for panel in json.loads(board.read_text())["panels"]:
            found += [
                (f"{board.stem}: {panel['title']}", each["expr"]) for each in panel["targets"]
            ]
    return found


def test_what_a_reader_chooses_by_is_asked_of_series_that_exist() -> None:
    for board in BOARDS:
        variables = json.loads(board.read_text())["templating"]["list"]
        queries = [each["query"] for each in variables if each["type"] == "query"]
        assert queries
        for query in queries:
            match = re.fullmatch(r"label_values\((\w+), (\w+)\)", query)
            assert match
            assert match[2] in known()[match[1]]


@pytest.mark.parametrize(("name", "query"), queries(), ids=[name for name, _ in queries()])
def test_a_query_asks_for_series_and_labels_that_exist(name: str, query: str) -> None:
    series = known()
    found = list(uses(promql_parser.parse(query)))
    assert found
    for use in found:
        assert use.series in series, f"{name}: no part has {use.series}"
        assert use.labels <= series[use.series], f"{name}: {use.labels - series[use.series]}"


def test_a_query_asks_for_values_that_the_code_gives() -> None:
    sources = [
        path.read_text()
        for root in ("operator", "services")
        for path in (ROOT / root).rglob("*.py")
        if "_pb2" not in path.name
    ]
    words = {word for text in sources for word in re.findall(r'"([^"\n]+)"', text)}
    asked = {
        value
        for _, query in queries()
        for use in uses(promql_parser.parse(query))
        for value in use.wanted
    }
    literal = {value for value in asked if not value.startswith("$")} - {"OPERATOR_NAMESPACE"}
    assert {"damaged", "lost", "node"} <= literal
    codes = "401|403|429|5.."
    assert {word for each in literal - {codes} for word in each.split("|")} <= words


def test_every_alert_says_what_is_wrong_and_leads_to_a_runbook() -> None:
    names = [alert["alert"] for alert in ALERTS]
    assert len(names) == len(set(names)) > 15
    for alert in ALERTS:
        page = ROOT / "docs" / "runbooks" / f"{alert['runbook']}.md"
        assert page.exists(), alert["alert"]
        assert f"`{alert['alert']}`" in page.read_text(), f"{page.name}: {alert['alert']}"
        assert alert["severity"] in {"info", "warning", "critical"}
        assert alert["summary"]
        assert alert["description"].endswith(".")
        shown = set(re.findall(r"\$labels\.(\w+)", alert["summary"] + alert["description"]))
        assert shown <= answered(alert["expr"]), alert["alert"]


def answered(query: str) -> set[str]:
    """Labels of what a query answers: what it groups by, else those of its series."""
    grouped = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", query))))
    return grouped or known()[next(uses(promql_parser.parse(query))).series]


def test_the_dashboards_are_what_their_generator_writes() -> None:
    made = runpy.run_path(str(ROOT / "hack" / "dashboards.py"))["files"]()
    assert made == {board.name: board.read_text() for board in BOARDS}


def monitored(**monitoring: Any) -> Rendered:
    return rendered({"monitoring": monitoring}, *SERVED)


def test_prometheus_scrapes_the_operator_and_what_it_makes() -> None:
    labels = {"release": "prometheus"}
    chart = monitored(podMonitors={"enabled": True, "labels": labels, "interval": "1m"})
    own = chart.one("PodMonitor", "etude-operator")
    runs = chart.one("PodMonitor", "etude-runs")
    assert own["spec"]["selector"] == chart.one("Deployment")["spec"]["selector"]
    assert own["spec"]["podMetricsEndpoints"][0]["honorLabels"], "series name a run's namespace"
    assert runs["spec"]["selector"]["matchLabels"] == {"app.kubernetes.io/managed-by": "etude"}
    assert runs["spec"]["namespaceSelector"] == {"any": True}
    for monitor in (own, runs):
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert (endpoint["port"], endpoint["interval"]) == ("probe", "1m")
    relabelings = runs["spec"]["podMetricsEndpoints"][0]["relabelings"]
    taken = {each["targetLabel"] for each in relabelings}
    assert taken == {"run", "pool", "route", "evaluation", "role"}


def test_prometheus_looks_where_the_operator_serves() -> None:
    values = {"monitoring": {"podMonitors": {"enabled": True}}, "watch": {"namespaces": ["lab"]}}
    monitor = rendered(values, *SERVED).one("PodMonitor", "etude-runs")
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["lab"]}


def test_rules_carry_labels_and_links_and_leave_out_what_nobody_wants() -> None:
    wanted = {
        "enabled": True,
        "labels": {"release": "prometheus"},
        "runbooks": "https://docs.example/runbooks/",
        "without": ["EtudePlansMissTheMark"],
    }
    rule = monitored(prometheusRule=wanted).one("PrometheusRule")
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    (group,) = rule["spec"]["groups"]
    names = {each["alert"]: each for each in group["rules"]}
    assert names.keys() == {each["alert"] for each in ALERTS} - {"EtudePlansMissTheMark"}
    leads = names["EtudeOperatorDoesNotAct"]
    assert leads["expr"] == f'absent(etude_leader{{namespace="{NAMESPACE}"}} == 1)'
    link = "https://docs.example/runbooks/the-operator-does-not-act.md"
    assert leads["annotations"]["runbook_url"] == link
    assert (leads["for"], leads["labels"]) == ("2m", {"severity": "critical"})
    assert "for" not in names["EtudeVersionRefused"], "one is enough"


def test_an_alert_that_does_not_exist_cannot_be_left_out() -> None:
    unknown = {"enabled": True, "without": ["EtudeIsTired"]}
    answer = refusal({"monitoring": {"prometheusRule": unknown}}, *SERVED)
    assert (
        "monitoring.prometheusRule.without: there is no alert EtudeIsTired: take one of" in answer
    )


@pytest.mark.parametrize(
    ("value", "kind"), [("podMonitors", "PodMonitor"), ("prometheusRule", "PrometheusRule")]
)
def test_a_cluster_without_the_prometheus_operator_is_told_what_is_missing(
    value: str, kind: str
) -> None:
    answer = refusal({"monitoring": {value: {"enabled": True}}})
    assert f"monitoring.{value}.enabled: this cluster serves no {kind}" in answer
    assert "install the Prometheus Operator's CRDs first, or set it to false" in answer


def test_dashboards_are_config_maps_that_a_sidecar_finds() -> None:
    folder = {"grafana_folder": "Etude"}
    chart = monitored(dashboards={"enabled": True, "labels": {"team": "rl"}, "annotations": folder})
    maps = chart.of("ConfigMap")
    assert len(maps) == len(BOARDS) == 5
    for each in maps:
        assert each["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert each["metadata"]["labels"]["team"] == "rl"
        assert each["metadata"]["annotations"] == folder
        ((name, text),) = each["data"].items()
        assert json.loads(text)["uid"] == Path(name).stem
    assert rendered({}).of("ConfigMap") == []
