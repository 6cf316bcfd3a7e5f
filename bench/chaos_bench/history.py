"""History of a run on a folder: steps, batches and rollouts of all its controllers."""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from etude.trainer.controller.journal.audit import JOURNAL, audit_journal, read_frames
from etude.v1 import journal_pb2


class StepRecord(NamedTuple):
    """One optimiser step."""

    loss: float
    grad_norm: float
    weight_digest: str


class BrokenCounts(NamedTuple):
    """Counts of what a run lost, repeated, or did otherwise than one that was never killed."""

    lost: int
    duplicated: int
    diverged: int


@dataclass(slots=True)
class RunHistory:
    """Records of a run's journal, those of dead controllers among them."""

    objects: dict[str, bytes]
    steps: list[tuple[int, StepRecord]] = field(default_factory=list)
    batches: dict[int, list[str]] = field(default_factory=dict)
    rollouts: set[str] = field(default_factory=set)

    @property
    def newest_step(self) -> int:
        """The newest step that is durable."""
        return max((number for number, _ in self.steps), default=0)

    def audit(self, *, acknowledged: Collection[str], max_staleness: int) -> BrokenCounts:
        """Audit the journal by itself."""
        audit = audit_journal(self.objects, acknowledged=acknowledged, max_staleness=max_staleness)
        for finding in audit.findings:
            print(f"  {finding}", flush=True)
        kinds = [finding.invariant for finding in audit.findings]
        repeated, reordered = kinds.count("I2"), kinds.count("I4")
        return BrokenCounts(len(kinds) - repeated - reordered, repeated, reordered)

    def compare(self, expected: "RunHistory", *, acknowledged: Collection[str]) -> BrokenCounts:
        """Compare with a run that was never killed."""
        broken = self.audit(acknowledged=acknowledged, max_staleness=0)
        wanted = dict(expected.steps)
        # A step that was trained again, after its checkpoint was lost, must have the same result.
        diverged = sum(wanted.get(number) != step for number, step in self.steps)
        diverged += len(wanted.keys() - dict(self.steps).keys())
        diverged += self.batches != expected.batches
        return broken._replace(diverged=broken.diverged + diverged)


def read_history(folder: Path, *, before_epoch: int | None = None) -> RunHistory:
    """Read the journal of a run, or what the controllers before an epoch wrote."""
    files = sorted((folder / JOURNAL).rglob("*.wal"))
    if before_epoch is not None:
        files = [path for path in files if int(path.parent.name) < before_epoch]
    history = RunHistory({path.relative_to(folder).as_posix(): path.read_bytes() for path in files})
    for data in history.objects.values():
        for _, payload in read_frames(data):
            record = journal_pb2.JournalRecord.FromString(payload)
            match record.WhichOneof("body"):
                case "step":
                    body = record.step
                    step = StepRecord(body.loss, body.grad_norm, body.weight_digest)
                    history.steps.append((body.step, step))
                case "batch":
                    history.batches[record.batch.step] = list(record.batch.group_ids)
                case "rollout":
                    history.rollouts.add(record.rollout.rollout.rollout_id)
                case _:
                    pass
    return history
