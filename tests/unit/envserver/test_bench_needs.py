"""Benches of microVMs on machines that can run none."""

import importlib
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "bench"


def test_a_bench_is_skipped_where_what_it_needs_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(BENCH)
    monkeypatch.setenv("PATH", str(tmp_path))
    needs = importlib.import_module("environment_bench.needs")
    assert needs.agent_here("starts", "cc") is None
    assert "starts: skipped, this machine lacks qemu-system-x86_64, cc" in capsys.readouterr().out
