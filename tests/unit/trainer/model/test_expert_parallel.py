"""Ranks that divide the experts of each layer train, publish and store as one rank does."""

from typing import Any

import pytest
from tests.support.trainer.expert_ranks import CASES, compare_all, save_models
from tests.support.trainer.rank_processes import run_ranks


@pytest.fixture(scope="module")
def comparisons(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    save_models(folder, list(CASES))
    found: dict[str, dict[str, Any]] = {}
    for size in sorted({case.ranks for case in CASES.values()}):
        names = [name for name, case in CASES.items() if case.ranks == size]
        found |= run_ranks(compare_all, folder, names, size=size)
    return found


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_divide_experts_make_the_steps_of_one(
    comparisons: dict[str, dict[str, Any]], case: str
) -> None:
    found = comparisons[case]
    assert found["weights changed"]
    assert min(found["norms"]) > 0.05  # the gradients were clipped
    for figure in ("loss", "norm", "weights", "next loss"):
        assert found[figure] <= 1e-6, figure
    # One rank alone, packed in place of padded, differs by 1.3e-6 with shared experts.
    assert found["gradients"] <= 2e-6


@pytest.mark.parametrize("case", CASES)
def test_versions_and_checkpoints_do_not_depend_on_how_experts_are_divided(
    comparisons: dict[str, dict[str, Any]], case: str
) -> None:
    found = comparisons[case]
    for figure in ("first version", "resumed", "resumed version", "reread"):
        assert found[figure], figure


@pytest.mark.parametrize("case", CASES)
def test_the_load_of_experts_is_over_all_ranks(
    comparisons: dict[str, dict[str, Any]], case: str
) -> None:
    divided, alone = comparisons[case]["loads"]
    assert all(figures["expert_load_ratio_worst"] > 1 for figures in alone)
    for found, expected in zip(divided, alone, strict=True):
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.ranks == 4])
def test_each_rank_holds_its_share_of_a_copy(
    comparisons: dict[str, dict[str, Any]], case: str
) -> None:
    copies = CASES[case].mesh.get("replicas", 1)
    assert comparisons[case]["share"] == pytest.approx(copies / 4, rel=0.05)


def test_recorded_experts_compute_on_the_ranks_that_have_them(
    comparisons: dict[str, dict[str, Any]],
) -> None:
    for figures in comparisons["recorded experts"]["loads"][0]:
        # Expert 5 has nearly half of the choices, of which an eighth would be even.
        assert 3.5 < figures["expert_load_ratio"] <= 4
