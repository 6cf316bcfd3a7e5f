"""The Makefile's targets are listed, always made, and are what the pages name."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z][a-z0-9-]*):", TEXT, re.MULTILINE))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "hack").rglob("*.md")])


def test_help_lists_every_target_with_a_sentence() -> None:
    done = subprocess.run(
        ("make", "--no-print-directory", "help"),
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    rows = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    assert {row[0] for row in rows} == TARGETS
    assert all(len(row) == 2 for row in rows)


def test_no_file_or_folder_keeps_a_target_from_being_made() -> None:
    """There are folders docs and bench: without the line make calls them up to date."""
    (phony,) = re.findall(r"^\.PHONY: (.*)$", TEXT, re.MULTILINE)
    assert set(phony.split()) == TARGETS


def named(page: Path) -> list[str]:
    """Targets in the text of a page, and in its blocks of commands."""
    text = page.read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"```(?:sh|console)\n(.*?)```", text, re.DOTALL))
    words = r"make (?:[A-Z]+=\S+ )*([a-z][a-z0-9-]*)"
    return re.findall(rf"`{words}", text) + re.findall(rf"^(?:\$ )?{words}", blocks, re.MULTILINE)


def test_every_target_that_a_page_names_exists() -> None:
    pages = {page.relative_to(ROOT): named(page) for page in PAGES}
    assert sum(map(len, pages.values())) > 20
    unknown = [f"{page}: {each}" for page, names in pages.items() for each in names]
    assert [each for each in unknown if each.rpartition(" ")[2] not in TARGETS] == []


def test_every_program_and_test_that_a_target_runs_is_there() -> None:
    words = re.findall(r"(?<=\s)(?:hack|tests|bench|\.ci)/[\w./-]+", TEXT)
    paths = {word.rstrip(".") for word in words if not word.startswith("bench/out")}
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
