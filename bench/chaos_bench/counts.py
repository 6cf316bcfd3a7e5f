"""Counts of the bench that kills, kept in a file after each kill."""

import json
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Self


@dataclass(slots=True, kw_only=True)
class Counts:
    """Counts of all runs of one kind so far."""

    kills: int = 0
    ended: int = 0
    """Runs that reached their ends."""
    lost: int = 0
    duplicated: int = 0
    diverged: int = 0
    max_steps_lost: int = 0
    by_role: Counter[str] = field(default_factory=Counter)
    """Kills by role and moment."""

    @classmethod
    def load(cls, file: Path) -> Self:
        """Counts of an interrupted call, or zeros."""
        if not file.exists():
            return cls()
        known = json.loads(file.read_text(encoding="utf-8"))
        return cls(**known | {"by_role": Counter(known["by_role"])})

    def save(self, file: Path) -> None:
        """Replace the file."""
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(self.figures(), indent=2) + "\n", encoding="utf-8")
        partial.replace(file)

    def figures(self) -> dict[str, int | dict[str, int]]:
        """All counts by name."""
        return {
            each.name: dict(self.by_role) if each.name == "by_role" else getattr(self, each.name)
            for each in fields(self)
        }

    def add_kill(self, name: str) -> None:
        """Count one kill."""
        self.kills += 1
        self.by_role[name] += 1

    def add_steps_lost(self, steps: int) -> None:
        """Count the steps that one death cost."""
        self.max_steps_lost = max(self.max_steps_lost, steps)

    def add_end(self, *, lost: int, duplicated: int, diverged: int) -> None:
        """Count a run that reached its end."""
        self.ended += 1
        self.lost += lost
        self.duplicated += duplicated
        self.diverged += diverged

    def merge(self, other: "Counts") -> "Counts":
        """The sum of both."""
        return Counts(
            kills=self.kills + other.kills,
            ended=self.ended + other.ended,
            lost=self.lost + other.lost,
            duplicated=self.duplicated + other.duplicated,
            diverged=self.diverged + other.diverged,
            max_steps_lost=max(self.max_steps_lost, other.max_steps_lost),
            by_role=self.by_role + other.by_role,
        )

    @property
    def is_sound(self) -> bool:
        """True if nothing was lost, counted twice or different."""
        return not (self.lost or self.duplicated or self.diverged)
