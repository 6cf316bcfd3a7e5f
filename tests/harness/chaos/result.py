"""What a run comes to: figures, a table of faults, and whether it passed."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.harness.chaos import schedule


@dataclass(slots=True, kw_only=True)
class Result:
    """One run on one store."""

    store: str
    versions: int
    wanted: int
    """Versions that were to be published."""
    wrong_bits: list[str]
    wrong_versions: list[str]
    unrecovered: list[str]
    """Replicas, processes or objects that did not come home."""
    unexplained: list[str]
    """What a replica noticed though an earlier check should have stopped it."""
    passes: int
    injected: Counter[str]
    seen: Counter[str]
    seconds: float
    peak_rss_mib: float
    mutation: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    least: Mapping[str, int] | None = None
    """Fewest faults of each kind; as the schedule says if not given."""

    @property
    def faults(self) -> int:
        """All that were injected."""
        return sum(self.injected.values())

    @property
    def too_few(self) -> list[str]:
        """Kinds of faults that were injected less often than a run must, or that nobody met."""
        asked = self.least
        if asked is None:
            asked = {kind: schedule.least(kind, self.wanted) for kind in schedule.LEAST}
        found = []
        for kind, least in asked.items():
            count = _count(self.injected, kind)
            if count < least:
                found.append(f"{kind}: {count} of {least}")
            elif least and self.least is None and not _count(self.seen, kind):
                # Real engines do not say which announcements they met.
                found.append(f"{kind}: nobody noticed any of {count}")
        return found

    @property
    def failures(self) -> list[str]:
        """Why the run did not pass; none if it did."""
        return [
            *(f"wrong bits: {each}" for each in self.wrong_bits),
            *(f"wrong version served: {each}" for each in self.wrong_versions),
            *(f"unrecovered: {each}" for each in self.unrecovered),
            *(f"unexplained: {each}" for each in self.unexplained),
        ]

    def line(self) -> str:
        """The claim in one line."""
        return (
            f"versions {self.versions}, faults {self.faults}, wrong bits {len(self.wrong_bits)}, "
            f"wrong version served {len(self.wrong_versions)}, unrecovered {len(self.unrecovered)}"
        )

    def table(self) -> str:
        """A line per kind of fault: how often injected, how often seen."""
        rows = [
            f"  {kind:<28} {self.injected[kind]:>5} injected {self.seen[kind]:>5} seen"
            for kind in sorted(self.injected)
        ]
        return "\n".join(rows)

    def to_json(self) -> dict[str, Any]:
        """For bench/out."""
        return {
            "store": self.store,
            "versions": self.versions,
            "faults": self.faults,
            "wrong_bits": len(self.wrong_bits),
            "wrong_version_served": len(self.wrong_versions),
            "unrecovered": len(self.unrecovered),
            "unexplained": len(self.unexplained),
            "states_served": self.passes,
            "injected": dict(sorted(self.injected.items())),
            "seen": dict(sorted(self.seen.items())),
            "too_few": self.too_few,
            "failures": self.failures[:50],
            "seconds": round(self.seconds, 1),
            "peak_rss_mib": round(self.peak_rss_mib, 1),
            **self.figures,
        }


def _count(faults: Counter[str], kind: str) -> int:
    return sum(n for name, n in faults.items() if name.startswith(kind))


def write(path: Path, results: list[Result], mutations: dict[str, bool]) -> None:
    """All runs on top of what they add up to."""
    runs = [result.to_json() for result in results]
    keys = ("versions", "faults", "wrong_bits", "wrong_version_served", "unrecovered")
    whole = {key: sum(run[key] for run in runs) for key in keys}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**whole, "stores": runs, "mutations_found": mutations}, indent=2)
    path.write_text(text + "\n")
