"""What every process of a chaos run is told."""

from dataclasses import dataclass
from pathlib import Path

from tests.harness.chaos.journal import Journal

from etude.common.blobs import Store, open_store
from etude.common.blobs.factory import Deadlines

RUN = "uid-chaos"

DEADLINES = Deadlines(connect_s=1, request_s=5, range_s=2, retries=2, retry_s=2)
"""Short, so that a stopped server costs a role seconds and not its run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run; crosses processes."""

    folder: Path
    """For journals, checkpoints and scratch space; the store has a folder of its own."""
    url: str
    endpoint: str | None = None
    seed: int = 0
    versions: int = 1000
    mutation: str = ""
    """Which check is broken on purpose; none if empty."""

    @property
    def patience_s(self) -> float:
        """How long nothing may happen; a broken check may well end a run that way."""
        return 12.0 if self.mutation else 60.0

    def raw_store(self) -> Store:
        """The store without faults of ours."""
        return open_store(self.url, endpoint=self.endpoint, deadlines=DEADLINES)

    def journal(self, who: str) -> Journal:
        """What one process writes down."""
        return Journal(self.folder / "journal" / f"{who}.jsonl")

    @property
    def ledger(self) -> Path:
        """Where the trainer says what it is about to publish."""
        return self.folder / "ledger.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The trainer's."""
        return self.folder / "checkpoints"

    @property
    def down(self) -> Path:
        """While this file exists, the store answers nobody."""
        return self.folder / "down"

    @property
    def collected(self) -> Path:
        """Changed whenever a collector has deleted something."""
        return self.folder / "collected"

    @property
    def calm(self) -> Path:
        """Once this file exists, no call meets a fault of chance."""
        return self.folder / "calm"
