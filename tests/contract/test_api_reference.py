"""The reference pages are what the models say."""

from pathlib import Path

import pytest

from etude.common.api.schema import reference

FOLDER = Path(__file__).parents[2] / reference.FOLDER
PAGES = [pytest.param(name, text, id=name) for name, text in reference.pages().items()]


@pytest.mark.parametrize(("name", "text"), PAGES)
def test_a_page_is_the_one_that_the_models_make(name: str, text: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == text, "run `make docs`"


@pytest.mark.parametrize(("name", "text"), PAGES)
def test_every_row_of_a_page_says_something(name: str, text: str) -> None:
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert rows, name
    for row in rows:
        cells = [cell.strip() for cell in row.replace("\\|", "/").split("|")[1:-1]]
        assert len(cells) == 4, row
        assert cells[1], row
        assert cells[3], row
