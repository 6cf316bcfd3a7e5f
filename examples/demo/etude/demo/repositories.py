"""One generated repository: three functions in three files, one of them with one wrong line."""

from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from etude.demo import words
from etude.demo.variants import FREQUENCIES, VERBS, Bug, BugClass, Verb

INDENT = "    "
NUM_FUNCTIONS = 3


class Variant(NamedTuple):
    """One row of the table: a verb and one way to get it wrong."""

    verb: Verb
    bug: Bug


VARIANTS = {
    kind: [Variant(verb, bug) for verb in VERBS for bug in verb.bugs if bug.kind == kind]
    for kind in BugClass
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function with its names filled in, alone in its file."""

    package: str
    module: str
    verb: Verb
    noun: str
    names: dict[str, str]
    """Word of each slot: a, b, xs."""

    @property
    def name(self) -> str:
        return f"{self.verb.name}_{self.noun}"

    @property
    def path(self) -> str:
        return f"{self.package}/{self.module}.py"

    @property
    def signature(self) -> str:
        """The first line of the file."""
        return f"def {self.name}({', '.join(self.names[slot] for slot in self.verb.slots)}):"

    def text(self, template: str) -> str:
        """A line of the table with this function's names."""
        return template.format_map(self.names)

    def source(self, bug: Bug | None = None) -> str:
        """The file, right or with one wrong line."""
        body = list(self.verb.body)
        if bug is not None:
            body[bug.line] = bug.text
        lines = (self.signature, *(INDENT + self.text(line) for line in body))
        return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """Three functions in a random order; the one at index `broken` has the bug."""

    package: str
    functions: tuple[Function, ...]
    broken: int
    bug: Bug

    @property
    def target(self) -> Function:
        """The function to repair."""
        return self.functions[self.broken]

    @property
    def identity(self) -> str:
        """Two repositories with the same identity pose the same problem."""
        return f"{self.target.path}:{self.target.name}:{self.bug.line}:{self.bug.text}"

    def sources(self, *, repaired: bool = False) -> dict[str, str]:
        """The package's files by path."""
        return {
            function.path: function.source(None if repaired or index != self.broken else self.bug)
            for index, function in enumerate(self.functions)
        }


def draw(random: Random) -> Repository:
    """A repository with a bug of a class drawn by its frequency, and words drawn evenly."""
    kind = random.choices(list(FREQUENCIES), weights=list(FREQUENCIES.values()))[0]
    broken = random.choice(VARIANTS[kind])
    others = random.sample([v for v in VERBS if v is not broken.verb], NUM_FUNCTIONS - 1)
    verbs = [broken.verb, *others]
    random.shuffle(verbs)
    package = random.choice(words.PACKAGES)
    modules = random.sample(words.MODULES, NUM_FUNCTIONS)
    nouns = random.sample(words.NOUNS, NUM_FUNCTIONS)
    functions = tuple(
        Function(package=package, module=module, verb=verb, noun=noun, names=_names(random))
        for module, verb, noun in zip(modules, verbs, nouns, strict=True)
    )
    return Repository(
        package=package,
        functions=functions,
        broken=verbs.index(broken.verb),
        bug=broken.bug,
    )


def _names(random: Random) -> dict[str, str]:
    return {
        "a": random.choice(words.FIRST_PARAMETERS),
        "b": random.choice(words.SECOND_PARAMETERS),
        "xs": random.choice(words.LISTS),
    }
