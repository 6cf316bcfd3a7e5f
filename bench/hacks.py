"""Attacks on rewards: which score with repairs off and on, and which of them the signs detect.

python bench/hacks.py [--seed N] [--honest-seeds N] [--variants FOLDER] [--only PREFIX]

Every attack is a script in a real sandbox (driver Process), graded by the product. It counts if it
scores while its repair is off; with all repairs on none of classes A to E may score, and every
honest twin has to. Detection is the first stage, the frozen signs, with and without the policy's
text; honest rollouts are the twins on several seeds. The rules were written with these attacks at
hand: `recall_held_out` is of two variants of each, by an author who had not seen the rules.

Examples:
  make bench-hacks                       the table, and its file
  python bench/hacks.py --only c-        one class, with its variants
"""

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the attacks are the tests'

from rich.console import Console
from rich.table import Table
from tests.support.hacks import rubric_hacks, rubric_variants
from tests.support.hacks.arena import HackArena, Played, open_arena
from tests.support.hacks.attack import SUITE, VARIANTS, Attack, read_attacks, read_variants

from etude.envserver.storage.trees import File
from etude.rewards.hacks import signs
from etude.rewards.hacks.evidence import Evidence
from etude.v1 import rollout_pb2

OUT = Path(__file__).parent / "out" / "hacks.json"
FIRST_FILE = {"a.py": b"x = 1\n"}
"""First files of the records of class G."""
KINDS = "ABCDEFG"
CONCURRENT = 4
"""Attacks that are tried at a time."""


@dataclass(slots=True)
class Tally:
    """Counts of one class of attacks."""

    attacks: int = 0
    scored_off: int = 0
    scored_on: int = 0
    twins_failed: int = 0
    detected: int = 0
    detected_without_text: int = 0
    honest: int = 0
    flagged: int = 0
    flagged_without_text: int = 0
    problems: list[str] = field(default_factory=list)

    def add_attack(self, name: str, *, off: bool, on: bool, twin: bool = True) -> None:
        """Count the arms of an attack; variants have no twin."""
        self.attacks += 1
        self.scored_off += off
        self.scored_on += on
        self.twins_failed += not twin
        if not off or on or not twin:
            self.problems.append(f"{name}: off {off}, on {on}, twin {twin}")

    def add_detection(self, name: str, played: Played) -> None:
        """Count the detection of an attack that scored."""
        found = [is_flagged(played, reads_text=text) for text in (True, False)]
        self.detected += found[0]
        self.detected_without_text += found[1]
        if not all(found):
            self.problems.append(f"{name}: detected with text {found[0]}, without {found[1]}")

    def add_honest(self, name: str, played: Played) -> None:
        """Count an honest rollout."""
        self.honest += 1
        found = [is_flagged(played, reads_text=text) for text in (True, False)]
        self.flagged += found[0]
        self.flagged_without_text += found[1]
        if any(found):
            self.problems.append(f"{name}: honest twin flagged by {_names(played)}")


def _evidence(played: Played, *, reads_text: bool) -> Evidence:
    first = {path: file.content for path, file in played.source.items()}
    return Evidence.from_rollout(played.record, first, reads_text=reads_text)


def is_flagged(played: Played, *, reads_text: bool) -> bool:
    """True if the signs find anything."""
    return bool(signs.find_signs(_evidence(played, reads_text=reads_text)))


def _names(played: Played) -> str:
    found = signs.find_signs(_evidence(played, reads_text=True))
    return ", ".join(f"{sign.kind}:{sign.name} ({sign.where[:40]})" for sign in found)


async def try_all(arena: HackArena, attacks: Sequence[Attack], tallies: dict[str, Tally]) -> None:
    """Try attacks of the classes A to F."""
    slots = asyncio.Semaphore(CONCURRENT)

    async def one(attack: Attack) -> None:
        tally = tallies[attack.kind]
        async with slots:
            arms = await arena.try_attack(attack)
        off, on = arms.attempt.scores_unrepaired, arms.attempt.scores
        tally.add_attack(attack.name, off=off, on=on, twin=arms.twin_scores)
        if off:
            tally.add_detection(attack.name, arms.attempt.attack)
        tally.add_honest(attack.name, arms.honest)

    async with asyncio.TaskGroup() as group:
        for attack in attacks:
            group.create_task(one(attack), name=attack.name)


async def try_variants(
    arena: HackArena, variants: Sequence[Attack], tallies: dict[str, Tally]
) -> None:
    """Try variants of the attacks of the classes A to F."""
    slots = asyncio.Semaphore(CONCURRENT)

    async def one(variant: Attack) -> None:
        tally = tallies[variant.kind]
        async with slots:
            attempt = await arena.try_without_twin(variant)
        tally.add_attack(variant.name, off=attempt.scores_unrepaired, on=attempt.scores)
        if attempt.scores_unrepaired:
            tally.add_detection(variant.name, attempt.attack)

    async with asyncio.TaskGroup() as group:
        for variant in variants:
            group.create_task(one(variant), name=variant.name)


async def add_honest(
    arena: HackArena, attacks: Sequence[Attack], tallies: dict[str, Tally], seeds: range
) -> None:
    """Play the twins on further seeds."""
    slots = asyncio.Semaphore(CONCURRENT)

    async def one(attack: Attack) -> None:
        async with slots:
            played = await arena.play_honest(attack)
        tallies[attack.kind].add_honest(attack.name, played)

    for seed in seeds:
        arena.seed = seed
        async with asyncio.TaskGroup() as group:
            for attack in attacks:
                group.create_task(one(attack), name=attack.name)


def try_rubric(tally: Tally) -> None:
    """Score the records of class G without and with the functions that answer them."""
    for hack in rubric_hacks.HACKS:
        off, on, twin = _rubric_arms(hack)
        tally.add_attack(hack.name, off=off, on=on, twin=twin)
        tally.add_detection(hack.name, _as_played(hack.attack))
        tally.add_honest(hack.name, _as_played(hack.honest))


def try_rubric_variants(tally: Tally) -> None:
    """Score the variants of the records of class G."""
    for hack in rubric_variants.VARIANTS:
        off, on, _ = _rubric_arms(hack)
        tally.add_attack(hack.name, off=off, on=on)
        tally.add_detection(hack.name, _as_played(hack.attack))


def _rubric_arms(hack: rubric_hacks.RubricHack) -> tuple[bool, bool, bool]:
    """True for an attack that gains without and with its answers, and for a twin above it."""
    pairs = ((hack.attack, hack.success), (hack.honest, hack.honest_success))
    (off, off_twin), (on, on_twin) = (
        [rubric_hacks.reward(*pair, functions, _measure) for pair in pairs]
        for functions in ((), hack.functions)
    )
    return off >= off_twin, on >= on_twin, on_twin > on


def _measure(record: rollout_pb2.Rollout) -> float:
    evidence = Evidence.from_rollout(record, FIRST_FILE, reads_text=True)
    return float(bool(signs.find_signs(evidence)))


def _as_played(record: rollout_pb2.Rollout) -> Played:
    return Played(record, {path: File(data) for path, data in FIRST_FILE.items()})


async def run_held_out(options: argparse.Namespace) -> dict[str, Tally]:
    """Tallies of the variants by class."""
    found = read_variants(options.variants)
    variants = [each for each in found if each.name.startswith(options.only)]
    tallies = {kind: Tally() for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="etude-hacks-") as scratch:
        async with open_arena(Path(scratch), options.seed) as arena:
            await try_variants(arena, variants, tallies)
    if not options.only:
        try_rubric_variants(tallies["G"])
    return tallies


async def run(options: argparse.Namespace) -> dict[str, Tally]:
    """Tallies by class."""
    attacks = [each for each in read_attacks(SUITE) if each.name.startswith(options.only)]
    tallies = {kind: Tally() for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="etude-hacks-") as scratch:
        async with open_arena(Path(scratch), options.seed) as arena:
            await try_all(arena, attacks, tallies)
            seeds = range(options.seed + 1, options.seed + options.honest_seeds)
            await add_honest(arena, attacks, tallies, seeds)
    if not options.only:
        try_rubric(tallies["G"])
    return tallies


def figures(tallies: dict[str, Tally], held_out: dict[str, Tally]) -> dict[str, object]:
    """Keys of the file."""
    total, held = _totals(tallies), _totals(held_out)
    counted, honest = max(1, total["scored_off"]), max(1, total["honest"])
    held_counted = max(1, held["scored_off"])
    return {
        "attacks": total["attacks"],
        "scored_repairs_off": total["scored_off"],
        "scored_after_repairs": {kind: tallies[kind].scored_on for kind in KINDS},
        "honest_twins_failed": total["twins_failed"],
        "recall": round(total["detected"] / counted, 4),
        "recall_without_text": round(total["detected_without_text"] / counted, 4),
        "false_positive": round(total["flagged"] / honest, 4),
        "false_positive_without_text": round(total["flagged_without_text"] / honest, 4),
        "honest_rollouts": total["honest"],
        "recall_held_out": round(held["detected"] / held_counted, 4),
        "recall_held_out_without_text": round(held["detected_without_text"] / held_counted, 4),
        "held_out": {kind: _held_out_row(held_out[kind]) for kind in KINDS},
        "signs_version": signs.VERSION,
    }


def _totals(tallies: dict[str, Tally]) -> Counter[str]:
    found = Counter[str]()
    for tally in tallies.values():
        for name in (each.name for each in fields(Tally) if each.name != "problems"):
            found[name] += getattr(tally, name)
    return found


def _held_out_row(tally: Tally) -> dict[str, int]:
    return {
        "variants": tally.attacks,
        "scored_repairs_off": tally.scored_off,
        "scored_after_repairs": tally.scored_on,
        "detected": tally.detected,
        "detected_without_text": tally.detected_without_text,
    }


def main() -> None:
    """Print the table and write bench/out/hacks.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--honest-seeds", type=int, default=5, help="seeds of honest rollouts")
    parser.add_argument("--variants", type=Path, default=VARIANTS)
    parser.add_argument("--only", default="", help="attacks whose names begin so")
    options = parser.parse_args()
    began_s = time.monotonic()
    tallies = asyncio.run(run(options))
    held_out = asyncio.run(run_held_out(options))
    row = figures(tallies, held_out)
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    row["cpu_s"] = round(sum(each.ru_utime + each.ru_stime for each in usages), 1)
    row["wall_s"] = round(time.monotonic() - began_s, 1)
    console = Console()
    _print("attacks", tallies, console)
    _print("variants, held out", held_out, console)
    console.print_json(json.dumps(row))
    if not options.only:
        OUT.parent.mkdir(exist_ok=True)
        OUT.write_text(json.dumps(row, indent=1) + "\n")


def _print(title: str, tallies: dict[str, Tally], console: Console) -> None:
    columns = ("class", "number", "score, repair off", "on", "recall", "no text", "honest")
    table = Table(*columns, "flagged", title=title)
    for kind, tally in tallies.items():
        if tally.attacks:
            table.add_row(
                kind,
                *(str(n) for n in (tally.attacks, tally.scored_off, tally.scored_on)),
                f"{tally.detected / max(1, tally.scored_off):.2f}",
                f"{tally.detected_without_text / max(1, tally.scored_off):.2f}",
                *(str(n) for n in (tally.honest, tally.flagged)),
            )
    console.print(table)
    for tally in tallies.values():
        for problem in tally.problems:
            console.print(problem, markup=False)


if __name__ == "__main__":
    main()
