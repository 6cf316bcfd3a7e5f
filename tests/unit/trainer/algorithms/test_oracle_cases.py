"""The cases of `make oracles`: our side alone, with norms that the others gave."""

import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def bench_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))


def bench_module(name: str) -> Any:
    return importlib.import_module(f"oracles_bench.{name}")


@pytest.mark.parametrize(
    ("name", "norm"),
    [("DAPO", 0.3260679860), ("DrGRPO", 0.2096151339), ("CISPO", 0.3180124570)],
)
def test_the_objective_has_the_gradient_of_other_libraries_on_the_fixed_batch(
    name: str, norm: float
) -> None:
    cases, gradients = bench_module("cases"), bench_module("gradients")
    formula = cases.FORMULAS[name]
    batch = gradients.compute_gradient(gradients.prepare(cases.fixed_case(), formula), formula)
    assert float(batch.gradient.norm()) == pytest.approx(norm, abs=1e-10)


def test_every_formula_has_a_gradient_on_every_random_batch() -> None:
    cases, gradients = bench_module("cases"), bench_module("gradients")
    for formula in cases.FORMULAS.values():
        for case in cases.draw_cases(count=5, seed=1):
            batch = gradients.compute_gradient(gradients.prepare(case, formula), formula)
            assert batch.gradient.isfinite().all()
            assert not batch.gradient[~case.mask].any()


def test_estimators_equal_what_enumeration_gives() -> None:
    exact = bench_module("enumeration").enumerate_exactly(seed=2)
    assert max(exact.values()) < 1e-12
