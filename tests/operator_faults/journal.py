"""What plans came to, kept in a file, so that a run of them that was cut short goes on."""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.operator_faults.crash_plans import Outcome, Plan
from tests.operator_faults.oracles import Reference

ROOT = Path(__file__).parents[2]
SOURCES = (
    *("operator/etude", "services/common/etude", "services/trainer/etude/trainer/controller"),
    *("helm/etude/files/crds", "tests/operator_faults"),
)
"""What a plan depends on: where one byte of these differs, everything is tried again."""


@dataclass(slots=True)
class Journal:
    """One workload: its reference, and the plans that have reached it."""

    path: Path
    code: str
    reference: Reference | None = None
    reached: set[Plan] = field(default_factory=set)

    @classmethod
    def of(cls, folder: Path, workload: str, code: str) -> "Journal":
        """What is known of a workload of this code."""
        journal = cls(folder / f"{workload}.jsonl", code)
        journal._read()
        return journal

    def begin(self, reference: Reference) -> None:
        """Start anew, with what plans are compared with."""
        self.reference, self.reached = reference, set()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        head = {"code": self.code, "reference": _written(reference)}
        self.path.write_text(json.dumps(head) + "\n", encoding="utf-8")

    def add(self, outcome: Outcome) -> None:
        """Keep a plan that has reached the reference; any other is tried again."""
        if not outcome.problems:
            self.reached.add(outcome.plan)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(outcome.plan) + "\n")

    def _read(self) -> None:
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # a process ended inside its last line
            self.path.write_text(whole, encoding="utf-8")
        head, *lines = [json.loads(line) for line in whole.splitlines()] or [{}]
        if head.get("code") == self.code:
            self.reference = _reference(head["reference"])
            self.reached = {Plan(*line) for line in lines}


def _written(reference: Reference) -> dict[str, Any]:
    return {
        "state": reference.state,
        "varying": sorted(reference.varying),
        "digest": reference.digest,
        "writes": reference.writes,
    }


def _reference(found: dict[str, Any]) -> Reference:
    return Reference(
        found["state"], frozenset(found["varying"]), Counter(found["digest"]), found["writes"]
    )


def code() -> str:
    """A digest of everything that a plan depends on."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".py", ".yaml"} and not path.name.startswith("test_"):
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
