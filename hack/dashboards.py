"""Writes the chart's Grafana dashboards from dashboards.yaml: `python hack/dashboards.py`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path("helm") / "etude" / "files" / "dashboards"
BOARDS = Path(__file__).with_suffix(".yaml")
COLUMNS = 3
WIDTH, HEIGHT = 24 // COLUMNS, 8
"""Of a panel, on Grafana's grid of 24 columns."""
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def query(panel: dict[str, Any], about: str) -> str:
    """A panel's PromQL; about is what a reader chose."""
    match panel:
        case {"rate": str(series), "by": list(labels)}:
            return f"sum by ({', '.join(labels)}) (rate({series}{{{about}}}[5m]))"
        case {"p95": str(series), "by": list(labels)}:
            grouped = f"sum by ({', '.join(['le', *labels])})"
            return f"histogram_quantile(0.95, {grouped} (rate({series}_bucket{{{about}}}[5m])))"
        case _:
            given: str = panel["query"]
            return given.replace("ABOUT", about)


def dashboard(name: str, board: dict[str, Any]) -> dict[str, Any]:
    """A dashboard as Grafana reads it."""
    return {
        "uid": f"etude-{name}",
        "title": board["title"],
        "tags": ["etude"],
        "schemaVersion": 39,
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": list(_variables(board["variables"]))},
        "panels": list(_panels(board)),
    }


def _variables(variables: dict[str, str]) -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "type": "datasource", "query": "prometheus"}
    for label, series in variables.items():
        yield {
            "name": label,
            "type": "query",
            "datasource": SOURCE,
            "query": f"label_values({series}, {label})",
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "current": {"text": "All", "value": "$__all"},
        }


def _panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    about = ",".join(f'{label}=~"${label}"' for label in board["variables"])
    for number, panel in enumerate(board["panels"]):
        row, column = divmod(number, COLUMNS)
        labels = panel.get("by", [board["about"]])
        legend = panel.get("legend", " ".join(f"{{{{{label}}}}}" for label in labels))
        yield {
            "id": number + 1,
            "title": panel["title"],
            "type": "timeseries",
            "datasource": SOURCE,
            "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
            "fieldConfig": {
                "defaults": {"unit": panel.get("unit", "short")},
                "overrides": [],
            },
            "targets": [{"refId": "A", "expr": query(panel, about), "legendFormat": legend}],
        }


def files() -> dict[str, str]:
    """Every file of the folder, by name."""
    boards = yaml.safe_load(BOARDS.read_text(encoding="utf-8"))
    made = {name: dashboard(name, board) for name, board in boards.items()}
    return {f"{name}.json": json.dumps(each, indent=1) + "\n" for name, each in made.items()}


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
