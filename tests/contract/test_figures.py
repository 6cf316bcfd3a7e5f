"""Figures of several suites lie in one file."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support import figures


def test_suites_add_to_what_others_recorded_and_replace_their_own(tmp_path: Path) -> None:
    figures.record("faults", tmp_path, crash_plans=3, reached_reference=2)
    figures.record("faults", tmp_path, mutations=1_000)
    path = figures.record("faults", tmp_path, reached_reference=3)
    found = json.loads(path.read_text())
    assert found == {"crash_plans": 3, "reached_reference": 3, "mutations": 1_000}


def test_no_figure_is_lost_when_suites_record_at_once(tmp_path: Path) -> None:
    names = [f"figure_{number}" for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: figures.record("out", tmp_path, **{name: 1}), names))
    assert set(json.loads((tmp_path / "out.json").read_text())) == set(names)


def test_a_figure_that_no_suite_recorded_is_named(tmp_path: Path) -> None:
    assert figures.absent("faults", ["mutations"], folder=tmp_path) == ["mutations"]
    figures.record("faults", tmp_path, rbac_unused=[], crashed=0)
    wanted = ["crashed", "mutations", "rbac_unused"]
    assert figures.absent("faults", wanted, folder=tmp_path) == ["mutations"]
