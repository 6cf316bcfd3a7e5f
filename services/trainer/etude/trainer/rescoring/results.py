"""Results of scoring rollouts again: one line per rollout, and a summary."""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from etude.common import atomic
from etude.common.errors import Problem, UserError
from etude.common.evaluation.rank_correlation import correlate_ranks
from etude.trainer.controller.reporting.rows import mean

ROWS = "rollouts.jsonl"
IDENTITY = "job.json"
SUMMARY = "summary.json"
MISSING = "its calls cannot be read"
"""Begin of the reason for which a rollout was left out whose calls are gone or damaged."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RescoreResults:
    """Folder of the results, which grows by groups and survives a kill."""

    folder: Path

    def claim(self, identity: bytes) -> None:
        """Make the folder, or go on in one of the same run and rubric.

        Raises:
            UserError: it has the results of another run or rubric.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / IDENTITY
        if not path.exists():
            atomic.write_bytes(path, identity)
        elif path.read_bytes() != identity:
            what, fix = "has results of another run or rubric", "name another folder"
            raise UserError(Problem("Conflict", what, str(self.folder), fix))

    def read(self) -> dict[str, Row]:
        """Newest row of each rollout; a line that a kill cut is left out, with all behind it."""
        path = self.folder / ROWS
        found: dict[str, Row] = {}
        for line in path.read_bytes().split(b"\n") if path.exists() else ():
            try:
                row: Row = json.loads(line)
            except ValueError:
                continue
            found[row["rollout_id"]] = row
        return found

    def add(self, rows: Iterable[Row]) -> None:
        """Append the rows of one group, durably.

        The first byte ends a line that an earlier process did not.
        """
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        with (self.folder / ROWS).open("a", encoding="utf-8") as file:
            file.write("\n" + text)
            file.flush()
            os.fsync(file.fileno())

    def write_summary(self, summary: Row) -> None:
        """Write the summary."""
        atomic.write_text(self.folder / SUMMARY, json.dumps(summary, indent=2) + "\n")


def summarise(rows: Sequence[Row]) -> Row:
    """Compare old and new rewards over the rollouts that have both.

    sibling_pairs_reversed is the share of pairs of siblings, of different old rewards, that the new
    rewards order the other way: advantages compare siblings alone. missing names rollouts that were
    left out because their calls are gone from the store, or damaged.
    """
    scored = [row for row in rows if "new_reward" in row]
    old, new = ([float(row[name]) for row in scored] for name in ("old_reward", "new_reward"))
    found = correlate_ranks(old, new)
    return {
        "rollouts": len(rows),
        "scored": len(scored),
        "left_out": sum("left_out" in row for row in rows),
        "missing": [
            row["rollout_id"] for row in rows if row.get("left_out", "").startswith(MISSING)
        ],
        "lost": sum("fault" in row for row in rows),
        "old_reward_mean": mean(old),
        "new_reward_mean": mean(new),
        "changed": sum(a != b for a, b in zip(old, new, strict=True)),
        "rank_correlation": None if found is None else found.value,
        "rank_correlation_95": None if found is None else [found.low, found.high],
        "sibling_pairs_reversed": _reversed_share(scored),
    }


def _reversed_share(scored: Iterable[Row]) -> float | None:
    """Share of sibling pairs in another order; None if no siblings differed."""
    groups: dict[str, list[Row]] = {}
    for row in scored:
        groups.setdefault(row["group_id"], []).append(row)
    differing = reversed_pairs = 0
    for siblings in groups.values():
        for a, b in combinations(siblings, 2):
            before = a["old_reward"] - b["old_reward"]
            differing += before != 0
            reversed_pairs += before * (a["new_reward"] - b["new_reward"]) < 0
    return reversed_pairs / differing if differing else None
