"""Rows of 64 k tokens that two ranks share."""

from pathlib import Path

import pytest
from tests.support.trainer.long_context_ranks import compare_long_rows

TOKENS = 65_536


@pytest.mark.long
def test_two_ranks_that_share_64k_tokens_make_the_step_of_one(tmp_path: Path) -> None:
    found = compare_long_rows(tmp_path, tokens=TOKENS)
    assert found.loss_difference <= 1e-6
    assert found.shared.largest_difference <= 1e-6
