"""Names and docstrings keep to the rules of docs/reference/glossary.md.

Each rule has a list of exceptions, which may only shrink: an exception that is no longer needed
fails its test.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.contract import terms_allowed as allowed

ROOT = Path(__file__).parents[2]
PRODUCT = ("operator", "services", "kernels", "cli")
GLOSSARY = (ROOT / "docs/reference/glossary.md").read_text(encoding="utf-8")

BARE = re.compile(
    r"_*(about|accepted|after|answered|asked|at|before|begun|believed|beside|came|carried|chosen|"
    r"come|concluded|decided|done|each|ended|ending|finished|fitting|followed|forgotten|found|"
    r"given|gone|heard|held|here|joined|judged|kept|known|lasting|least|left|less|made|meant|"
    r"mended|met|more|most|moved|named|next|noted|now|observed|opened|others|owed|own|places|put|"
    r"reached|recorded|restarted|resting|resumed|said|seen|settled|shown|spared|started|taken|"
    r"tended|then|there|told|touched|understood|undertaken|undone|wanted|whole|words)_*"
)
"""Participles, adverbs and pronouns: they say something about a thing and not which one it is."""

WH = re.compile(
    r"(what|who|whom|whose|whether|which|where|how|when|why|whoever|likewise)\b", re.IGNORECASE
)
REPEATED = {"Settings"}
"""Class names that every service may have."""
MAX_MODULES = 2
"""In which one class name may stand."""


class Definition(NamedTuple):
    """A module, class or function of the product."""

    module: str
    kind: type[ast.AST]
    name: str
    docstring: str

    @property
    def place(self) -> str:
        """The name by which exceptions refer to it."""
        return f"{self.module}:{self.name}" if self.name else self.module


@cache
def definitions() -> tuple[Definition, ...]:
    return tuple(each for root in PRODUCT for each in _definitions_of(ROOT / root))


def _definitions_of(root: Path) -> Iterator[Definition]:
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if "etude" not in parts or path.stem.endswith(("_pb2", "_pb2_grpc")):
            continue
        module = ".".join(parts[parts.index("etude") :]).removesuffix(".__init__")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        yield Definition(module, ast.Module, "", ast.get_docstring(tree) or "")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield Definition(module, type(node), node.name, ast.get_docstring(node) or "")


def banned_words() -> tuple[str, ...]:
    """The archaic words that the glossary lists."""
    match = re.search(r"\*\*Words that no docstring has:\*\* (.*?)\.\n", GLOSSARY, re.DOTALL)
    assert match is not None
    return tuple(re.split(r",\s+", " ".join(match[1].split())))


def check(found: set[str], exceptions: frozenset[str]) -> None:
    """Fail for what breaks a rule, and for an exception that nothing needs."""
    assert sorted(found - exceptions) == [], "see docs/reference/glossary.md"
    assert sorted(exceptions - found) == [], "remove these from tests/contract/terms_allowed.py"


def test_no_class_name_stands_in_more_than_two_modules() -> None:
    modules: dict[str, set[str]] = defaultdict(set)
    for each in definitions():
        if each.kind is ast.ClassDef and not each.name.startswith("_"):
            modules[each.name].add(each.module)
    repeated = {name for name, found in modules.items() if len(found) > MAX_MODULES}
    check(repeated - REPEATED, allowed.CLASSES)


def test_no_name_is_a_bare_participle_adverb_or_pronoun() -> None:
    found = set()
    for each in definitions():
        name = each.name or each.module.rpartition(".")[2]
        if BARE.fullmatch(name.lower()):
            found.add(each.place)
    check(found, allowed.NAMES)


def test_no_docstring_begins_with_a_question_word() -> None:
    found = {each.place for each in definitions() if WH.match(each.docstring.lstrip())}
    check(found, allowed.DOCSTRINGS)


def test_no_docstring_has_an_archaic_word() -> None:
    archaic = re.compile(rf"\b({'|'.join(map(re.escape, banned_words()))})\b", re.IGNORECASE)
    found = {
        f"{each.place} {match[0].lower()}"
        for each in definitions()
        for match in archaic.finditer(" ".join(each.docstring.split()))
    }
    check(found, allowed.WORDS)


def terms() -> Iterator[tuple[str, str]]:
    """Each term of the glossary with the names of its third column."""
    for row in re.findall(r"^\| (?!term|---)(.*) \|$", GLOSSARY, re.MULTILINE):
        term, _, code, _ = row.split(" | ")
        for name in re.findall(r"`([^`]+)`", code):
            yield term, name


@cache
def _names_of_the_code() -> frozenset[str]:
    """Every word of the product's sources, the wire and the chart's CRDs."""
    patterns = ("operator/**/*.py", "services/**/*.py", "kernels/**/*.py", "cli/**/*.py")
    paths = [path for pattern in patterns for path in ROOT.glob(pattern)]
    paths += [*ROOT.glob("protos/etude/v1/*.proto"), *ROOT.glob("services/**/*.go")]
    return frozenset(
        word for path in paths for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))
    )


def _exists(name: str, modules: frozenset[str]) -> bool:
    if name.startswith("etude."):
        return name in modules
    if "/" in name or name.endswith(".toml"):
        return (ROOT / name).exists()
    words = name.removeprefix("spec.").split(".")
    return all(word in _names_of_the_code() for word in words)


def test_every_name_in_the_glossary_exists_in_the_code() -> None:
    modules = frozenset(each.module for each in definitions())
    assert [f"{term}: {name}" for term, name in terms() if not _exists(name, modules)] == []


def test_the_glossary_is_about_150_terms_without_repetition() -> None:
    rows = re.findall(r"^\| (?!term|---)(.*?) \| ", GLOSSARY, re.MULTILINE)
    assert len(rows) >= 150
    assert sorted(rows) == sorted(set(rows))
