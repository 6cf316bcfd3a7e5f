"""The API reference page is what the models say."""

from pathlib import Path

from etude.common.api import reference

ROOT = Path(__file__).parents[2]


def test_the_page_is_the_one_that_the_models_make() -> None:
    written = (ROOT / reference.PAGE).read_text(encoding="utf-8")
    assert written == reference.page(), "run `make docs`"


def test_every_row_of_the_page_says_something() -> None:
    for line in reference.page().splitlines():
        if line.startswith("| `"):
            cells = [cell.strip() for cell in line.replace("\\|", "/").split("|")[1:-1]]
            assert len(cells) == 4, line
            assert cells[1], line
            assert cells[3], line
