"""Redaction and isolation of feedback, against their goals.

python bench/privacy.py [--secrets N] [--events N] [--seed N]

Secrets of twenty-one formats are planted in texts and redacted; lines of this repository's code are
redacted, and should stay; texts as events have them are redacted for a few CPU seconds. Then random
events of two tenants, with and without consent, right and wrong keys, go through the intake of the
feedback service, and an oracle of its own says which of them may be read by whom.
Exits with 1 if a goal is missed.

Examples:
  make test-privacy                      the tests, then this
  python bench/privacy.py --secrets 5000 a narrower interval
"""

import argparse
import asyncio
import itertools
import json
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the planted secrets are the tests'

from tests.support import figures
from tests.support.feedback import events as examples
from tests.support.feedback.lives import SERVER, Stores, living, read_all
from tests.support.feedback.planted_secrets import PERSONAL, is_left, plant

from etude.common.redact.redactor import Redactor

ROOT = Path(__file__).parents[1]
TEXT_BYTES = 4_096
"""Size of a text in the measurement of speed: a user's message with some code."""
CPU_S = 3.0
GOALS: Mapping[str, float] = {"recall": 0.995, "recall_personal": 0.95, "mb_per_cpu_s": 20}
LIMITS: Mapping[str, float] = {"clean_touched": 0.01, "cross_tenant": 0, "without_consent": 0}


def main() -> None:
    """Measure, print, and write bench/out/privacy.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--secrets", type=int, default=1_000)
    parser.add_argument("--events", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    redactor = Redactor(bytes(32))
    found: dict[str, float] = {
        **measure_recall(redactor, options.secrets, options.seed),
        "clean_touched": measure_clean_lines(redactor),
        "mb_per_cpu_s": measure_speed(redactor, options.seed),
        **asyncio.run(measure_isolation(options.events, options.seed)),
    }
    figures.record("privacy", **found)
    print(json.dumps(found, indent=2))
    missed = [name for name, goal in GOALS.items() if found[name] < goal]
    missed += [name for name, limit in LIMITS.items() if found[name] > limit]
    if missed:
        sys.exit(f"missed: {', '.join(missed)}")


def measure_recall(redactor: Redactor, num_secrets: int, seed: int) -> dict[str, float]:
    """Share of planted secrets of which no six characters in a row are left."""
    total: Counter[bool] = Counter()
    missed: Counter[bool] = Counter()
    formats: Counter[str] = Counter()
    for planted in plant(num_secrets, seed=seed):
        is_personal = planted.format in PERSONAL
        total[is_personal] += 1
        if is_left(planted.secret, redactor.redact_text(planted.text)[0]):
            missed[is_personal] += 1
            formats[planted.format] += 1
    if formats:
        print("missed by format:", dict(formats))
    return {
        "recall": 1 - missed[False] / total[False],
        "recall_personal": 1 - missed[True] / total[True],
    }


def code_lines() -> list[str]:
    """Lines of code that hold no secrets."""
    files = itertools.chain(
        ROOT.glob("operator/etude/**/*.py"),
        ROOT.glob("services/*/etude/**/*.py"),
        ROOT.glob("services/envserver/guest/**/*.go"),
    )
    texts = (file.read_text() for file in files if "redact" not in file.parts)
    return [line for text in texts for line in text.splitlines() if line.strip()]


def measure_clean_lines(redactor: Redactor) -> float:
    """Share of lines of code that redaction changes."""
    lines = code_lines()
    return sum(bool(redactor.find(line.encode())) for line in lines) / len(lines)


def measure_speed(redactor: Redactor, seed: int) -> float:
    """Megabytes a CPU second, of code with a secret in one text of ten."""
    rng = random.Random(seed)  # noqa: S311 - not for secrets
    whole = "\n".join(code_lines())
    texts = []
    for planted in plant(200, seed=seed):
        start = rng.randrange(len(whole) - TEXT_BYTES)
        text = whole[start : start + TEXT_BYTES]
        texts.append(f"{text}\n{planted.text}" if rng.random() < 0.1 else text)
    num_bytes, began_s = 0, time.process_time()
    while (spent_s := time.process_time() - began_s) < CPU_S:
        for text in texts:
            redactor.redact_text(text)
            num_bytes += len(text.encode())
    return num_bytes / 1e6 / spent_s


def random_events(num_events: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    """What varies between events."""
    for number in range(num_events):
        yield {
            "id": f"e{number}",
            "user": f"u-{rng.randrange(200)}",
            "tenant": rng.choice(["acme", "other"]),
            "granted": rng.random() < 0.7,
            "terms": rng.choice([examples.TERMS] * 4 + ["2025-01"]),
            "decided": f"2026-11-01T{rng.randrange(24):02}:{rng.randrange(60):02}:00Z",
        }


async def measure_isolation(num_events: int, seed: int) -> dict[str, float]:
    """Events that a tenant can read of another, and events that are used without consent."""
    rng = random.Random(seed)  # noqa: S311 - not for secrets
    stores = Stores()
    sent: dict[str, dict[str, Any]] = {}
    decisions: defaultdict[tuple[object, object], Decisions] = defaultdict(Decisions)
    async with living(stores) as intake:
        for fields in random_events(num_events, rng):
            owner = SERVER._replace(tenant=rng.choice(["acme", "other"]))
            await intake.take([examples.encoded(**fields)], owner)
            sent[str(fields["id"])] = fields
            if owner.tenant == fields["tenant"]:
                decisions[fields["tenant"], fields["user"]].add(fields)
        cross_tenant = without_consent = num_read = 0
        for tenant in ("acme", "other"):
            for event in read_all(intake.ledger, tenant):
                fields = sent[json.loads(event.text)["id"]]
                num_read += 1
                cross_tenant += fields["tenant"] != tenant
                granted = decisions[fields["tenant"], fields["user"]].consents()
                agreed = fields["granted"] and fields["terms"] == examples.TERMS
                without_consent += not (granted and agreed)
    if not num_read:
        sys.exit("no event was read: nothing was measured")
    return {
        "cross_tenant": cross_tenant,
        "without_consent": without_consent,
        "events": num_events,
        "events_read": num_read,
    }


@dataclass(slots=True)
class Decisions:
    """Decisions of one user, from which the oracle alone says whether the user consents."""

    agreed: list[str] = field(default_factory=list)
    """Times of the agreements to the tenant's terms."""
    refused: list[str] = field(default_factory=list)
    """Times of the refusals that were sent after an agreement."""

    def add(self, fields: Mapping[str, object]) -> None:
        if not fields["granted"]:
            if self.agreed:
                self.refused.append(str(fields["decided"]))
        elif fields["terms"] == examples.TERMS:
            self.agreed.append(str(fields["decided"]))

    def consents(self) -> bool:
        """Return true if the user agreed, and did not refuse after every agreement."""
        return bool(self.agreed) and max(self.agreed) > max(self.refused, default="")


if __name__ == "__main__":
    main()
