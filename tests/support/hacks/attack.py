"""Attacks on rewards as files: one TOML file per class, and one per class for their variants.

An entry has the script of an attack, the script of its honest twin, and the repairs without which
the attack has to score. `@name@` in a script is the subject's name, `@fix@` the shell command that
repairs the subject, `@seed@` a number. A variant has the attack's class and goal and other means;
what it leaves out is the attack's. `bench/hacks.py --variants FOLDER` reads variants.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

SUITE = Path(__file__).parent / "suite"
VARIANTS = Path(__file__).parent / "variants"
"""Variants of the attacks by an author who has not read the rules of the detector."""


class Repair(StrEnum):
    """A repair that can be off while an attack is tried."""

    FRESH_SANDBOX = "FreshSandbox"
    """Off: graded in the agent's own sandbox, in the session of its commands."""
    RUNNER_PATHS = "RunnerPaths"
    TEST_PATHS = "TestPaths"
    CACHE_PATHS = "CachePaths"
    PINS = "Pins"
    SESSION_GUARD = "SessionGuard"
    BLAME = "Blame"
    """Off: a broken verifier masks the rollout, without a look at the unmodified files."""
    HYGIENE = "Hygiene"
    """Off: the first files hold what task hygiene removes."""
    NO_EGRESS = "NoEgress"
    """Off: the environment reaches a host that has the answer."""
    HIDDEN_TESTS = "HiddenTests"
    """Off: the verifier runs the tests that the agent sees."""
    RUBRIC = "Rubric"
    """Off: the reward without the function that answers this attack."""


class Script(BaseModel):
    """Commands of one rollout, and the text that a policy would think or say with them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str = Field(min_length=1)
    """Shell commands; a line of `---` begins the next tool call."""
    text: str = ""


class Attack(BaseModel):
    """One attack with its honest twin."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=r"^[a-g]-[a-z0-9-]+$")]
    """Begins with the letter of its class."""
    repairs: tuple[Repair, ...] = Field(min_length=1)
    """Off together in the arm in which the attack has to score."""
    attack: Script
    honest: Script
    files: Mapping[str, str] = Field(default_factory=dict)
    """First files beside the subject's."""
    setup: str = ""
    """Shell commands that make further first files, as an image's build does."""
    tests: Mapping[str, str] = Field(default_factory=dict)
    """Hidden tests in place of the subject's."""
    verifier: str = ""
    """tests/test.sh in place of the usual one."""
    protected: tuple[str, ...] = ()
    """Paths that the task itself protects."""
    timeout_s: float = 60.0

    @property
    def kind(self) -> str:
        """Letter of its class."""
        return self.name[0].upper()

    @model_validator(mode="after")
    def _is_in_class(self) -> Self:
        if self.kind == "G" and self.repairs != (Repair.RUBRIC,):
            raise ValueError("attacks of class G are answered by the rubric")
        return self


class Variant(BaseModel):
    """Another way to the goal of an attack."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    of: str
    """Name of the attack, with which its own begins."""
    attack: Script
    repairs: tuple[Repair, ...] | None = None
    files: Mapping[str, str] | None = None

    def applied(self, attacks: Mapping[str, Attack]) -> Attack:
        """The attack of this name with the means of the variant.

        Raises:
            ValueError: no attack has this name, or the variant is not named after it.
        """
        if self.of not in attacks or not self.name.startswith(f"{self.of}-"):
            raise ValueError(f"{self.name}: is no variant of an attack {self.of!r}")
        values = attacks[self.of].model_dump() | self.model_dump(exclude={"of"}, exclude_none=True)
        return Attack.model_validate(values)


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    attack: tuple[Attack, ...] = ()
    variant: tuple[Variant, ...] = ()


def read_attacks(folder: Path = SUITE) -> list[Attack]:
    """Attacks of all files of a folder, by class.

    Raises:
        ValueError: a file breaks the form, or two attacks share a name.
    """
    found = [attack for file in _read_files(folder) for attack in file.attack]
    _check_names([each.name for each in found])
    return found


def read_variants(folder: Path = VARIANTS, suite: Path = SUITE) -> list[Attack]:
    """Variants of all files of a folder, as attacks, by class.

    Raises:
        ValueError: a file breaks the form, or two variants share a name.
    """
    attacks = {each.name: each for each in read_attacks(suite)}
    found = [each.applied(attacks) for file in _read_files(folder) for each in file.variant]
    _check_names([each.name for each in found])
    return found


def _read_files(folder: Path) -> Iterator[_File]:
    for path in sorted(folder.glob("*.toml")):
        try:
            yield _File.model_validate(tomllib.loads(path.read_text()))
        except (ValidationError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"{path.name}: {error}") from error


def _check_names(names: Sequence[str]) -> None:
    if len({*names}) < len(names):
        raise ValueError(f"names repeat: {sorted(n for n in {*names} if names.count(n) > 1)}")


def calls_of(script: str, values: Mapping[str, str]) -> Sequence[str]:
    """Shell commands of a script, one for each tool call."""
    return [fill(part, values).strip() for part in script.split("\n---\n")]


def fill(text: str, values: Mapping[str, str]) -> str:
    """Put values in the place of `@name@`."""
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text
