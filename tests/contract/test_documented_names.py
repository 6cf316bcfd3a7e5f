"""What pages name in passing exists: fields, values of the chart, variables, files, reasons."""

import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from etude.cli.kubectl.diagnose.advice import ADVICE
from etude.common.api.schema import crd
from etude.operator.reasons import Reason

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for page in [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "hack/testbed/README.md",
    ]
    # Decisions and changes tell of their time, and the last is generated from the models.
    if "adr" not in page.parts and page.name not in {"CHANGELOG.md", "api.md"}
)
FOLDERS = (
    *("bench", "cli", "docs", "examples", "hack", "helm", "operator", "protos", "services"),
    *(f"tests/{each.name}" for each in (ROOT / "tests").iterdir() if each.is_dir()),
)
SOURCE_ROOTS = ("operator", "cli", "services/*")
MADE = ("bench/out/", "tests/data/releases/VERSION")
"""Files that appear when something is run."""
LITERAL = {"spec.path"}
"""Fields that stand for any."""

Schema = Mapping[str, Any]


class Word(NamedTuple):
    """Something in code quotes."""

    page: str
    text: str


def quoted() -> Iterator[Word]:
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for text in re.findall(r"`([^`\n]+)`", prose):
            yield Word(str(page.relative_to(ROOT)), text)


WORDS = tuple(quoted())


def matches(pattern: str) -> list[Word]:
    """Every match in what is in code quotes, with its page."""
    found = [Word(w.page, each) for w in WORDS for each in re.findall(pattern, w.text)]
    assert found, f"no page has {pattern}: the pattern is wrong"
    return found


def test_every_field_that_a_page_names_exists() -> None:
    schemas = [crd.definition(kind)["spec"]["versions"][0]["schema"] for kind in crd.KINDS]
    named = matches(r"(?:^|[ \"{(])((?:spec|status)(?:\.[a-zA-Z0-9]+(?:\[[^\]]*\])?)+)")
    unknown = [
        word
        for word in named
        if word.text not in LITERAL
        and not any(has(each["openAPIV3Schema"], word.text.split(".")) for each in schemas)
    ]
    assert unknown == []


def has(node: Schema, path: list[str]) -> bool:
    """Whether a schema has a path; brackets stand for any item of a list."""
    for part in path:
        name = part.partition("[")[0]
        if name.isdecimal():  # an item of a list, as `--set` names it
            continue
        if node.get("x-kubernetes-preserve-unknown-fields"):
            return True
        node = node.get("items", node)
        node = node.get("properties", {}).get(name, node.get("additionalProperties"))
        if not node:
            return False
    return True


def test_every_value_of_the_chart_that_a_page_names_exists() -> None:
    values = yaml.safe_load((ROOT / "helm/etude/values.yaml").read_text())
    heads = "|".join(values)
    given = matches(rf"(?:^|--set )((?:{heads})(?:\.[a-zA-Z]+)*)(?==)")
    blocks = "\n".join(page.read_text() for page in PAGES)
    given += [Word("", each) for each in re.findall(r"--set ([a-zA-Z.]+)=", blocks)]
    unknown = []
    for word in given:
        node: Any = values
        for part in word.text.split("."):
            node = node.get(part, ...) if isinstance(node, dict) else ...
        unknown += [word] if node is ... and not word.text.startswith("spec.") else []
    assert unknown == []


def test_every_variable_that_a_page_names_is_read() -> None:
    words = ("git", "grep", "-hoE", "ETUDE_[A-Z0-9_]+", "--", ":!docs", ":!*.md")
    done = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60)
    known = set(done.stdout.split())
    assert [word for word in matches(r"\bETUDE_[A-Z0-9_]+\b") if word.text not in known] == []


def test_every_file_of_the_repository_that_a_page_names_is_there() -> None:
    named = matches(rf"(?:^|[ /])((?:{'|'.join(FOLDERS)})/[\w./-]+)")
    gone = [
        word
        for word in named
        if not word.text.startswith(MADE)
        # ARCHITECTURE.md names modules below their source roots.
        and not any(ROOT.glob(word.text.rstrip(".")))
        and not any(any(ROOT.glob(f"{root}/etude/{word.text}")) for root in SOURCE_ROOTS)
    ]
    assert gone == []


def test_every_reason_that_a_page_names_exists() -> None:
    spec = crd.definition(next(k for k in crd.KINDS if k.name == "Checkpoint"))["spec"]
    saved = spec["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    known = {*map(str, Reason), *ADVICE, *saved["properties"]["reason"]["enum"]}
    text = "\n".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"[Rr]easons? `([A-Z][A-Za-z]+)`", text))
    assert len(named) > 10
    assert named - known == set()
