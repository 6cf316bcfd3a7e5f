"""The metrics reference has every series of every part, by the name that Prometheus shows."""

import importlib
import runpy
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.metrics import MetricWrapperBase

ROOT = Path(__file__).parents[2]
GENERATOR = runpy.run_path(str(ROOT / "hack" / "metrics_reference.py"))
PARTS = ("operator", "trainer", "inference", "envserver", "rewards", "gateway", "feedback")
SERIES = {"counter": "_total"}
"""What the text format adds to a metric's name; a histogram has three endings of its own."""


def test_the_page_is_generated_from_the_code() -> None:
    assert (ROOT / GENERATOR["PAGE"]).read_text(encoding="utf-8") == GENERATOR["page"](ROOT)


@pytest.mark.parametrize("part", PARTS)
def test_every_metric_of_a_part_is_on_the_page(part: str) -> None:
    written = GENERATOR["page"](ROOT)
    made = vars(importlib.import_module(f"etude.{part}.metrics")).values()
    shown: list[Metric] = [
        found for each in made if isinstance(each, MetricWrapperBase) for found in each.describe()
    ]
    assert shown
    for metric in shown:
        name = f"{metric.name}{SERIES.get(metric.type, '')}"
        assert f"| `{name}` | {metric.type} |" in written
