"""Every page can be found from the first one."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def linked(page: Path) -> set[Path]:
    targets = re.findall(r"\]\(([^)#:]+\.md)", page.read_text())
    return {(page.parent / target).resolve() for target in targets}


def test_the_first_page_lists_every_page_but_the_decisions() -> None:
    pages = {page.resolve() for page in DOCS.rglob("*.md") if page.parent.name != "adr"}
    decisions = (DOCS / "adr" / "README.md").resolve()
    listed = linked(DOCS / "index.md")
    assert decisions in listed
    assert pages - listed - {(DOCS / "index.md").resolve()} == set()


def test_the_list_of_decisions_is_made_of_their_titles() -> None:
    generator = runpy.run_path(str(ROOT / "hack" / "decisions.py"))
    page = (DOCS / "adr" / "README.md").read_text(encoding="utf-8")
    assert page == generator["page"](ROOT), "python hack/decisions.py"
    pages = {page.resolve() for page in (DOCS / "adr").glob("[0-9]*.md")}
    assert pages <= linked(DOCS / "adr" / "README.md")
