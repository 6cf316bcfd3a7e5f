"""What a run of hostile frames came to."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from tests.harness.fuzz.mutator import CORPUS

_SHOWN = 20


@dataclass(slots=True)
class Counts:
    """Frames that were taken, and what they broke."""

    frames: int = 0
    """Those that the other end has parsed or refused; what nobody read is none."""
    refused: int = 0
    crashes: int = 0
    hangs: int = 0
    findings: list[str] = field(default_factory=list)
    corpus: Path = CORPUS
    """Where what broke something is kept, and replayed from."""

    def __iadd__(self, other: "Counts") -> "Counts":
        self.frames += other.frames
        self.refused += other.refused
        self.crashes += other.crashes
        self.hangs += other.hangs
        self.findings += other.findings[: max(0, _SHOWN - len(self.findings))]
        return self

    def crash(self, what: str, said: bytes) -> None:
        """Note a crash, and keep what brought it about."""
        self.crashes += 1
        self._found(what, said)

    def hang(self, what: str, said: bytes) -> None:
        """Note somebody who waits for ever, and keep what brought it about."""
        self.hangs += 1
        self._found(what, said)

    def _found(self, what: str, said: bytes) -> None:
        self.corpus.mkdir(parents=True, exist_ok=True)
        path = self.corpus / f"{hashlib.sha256(said).hexdigest()[:16]}.said"
        path.write_bytes(said)
        if len(self.findings) < _SHOWN:
            self.findings.append(f"{path.name}: {what}")
