"""Reason codes: code and reference agree."""

from pathlib import Path

from etude.operator.reasons import Reason
from etude.operator.reference import PAGE, meanings, page

ROOT = Path(__file__).parents[2]


def test_every_reason_has_one_sentence_of_meaning() -> None:
    assert set(meanings()) == {str(reason) for reason in Reason}
    assert all(text.strip() for text in meanings().values())


def test_the_reference_is_generated_from_the_code() -> None:
    assert (ROOT / PAGE).read_text() == page()
