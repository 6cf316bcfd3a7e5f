"""Offline audit of a journal: every accepted rollout is accounted for, and none counts twice.

It shares no code with the journal's writer, so that a mistake there cannot hide itself.
"""

import struct
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from google.protobuf.message import DecodeError

from etude.v1 import journal_pb2 as pb

JOURNAL = "journal/"

MASKING = frozenset({"platform", "invalid_span", "erased", "damaged"})
REDRAWING = frozenset({"quarantined_policy", "suspect_policy", "rolled_back_policy", "slow"})
REPEATING = MASKING - {"platform"}
"""Reasons to drop single rollouts also when their batch is trained again, without them."""
WHOLE = frozenset(
    {
        *("stale", "surplus", "other_policy", "frozen_window", "expired", "too_few_rollouts"),
        *("damaged_window", "kl_budget"),
    }
)
EITHER = frozenset({"slow"})
"""Reasons to drop groups or single rollouts, as the phase says."""
REASONS = MASKING | REDRAWING | WHOLE
"""All reasons to drop a rollout."""


class JournalFinding(NamedTuple):
    """One broken invariant."""

    invariant: str
    """I1 conservation, I2 uniqueness, I3 staleness, I4 order of steps, I5 order of checkpoints,
    log: the log itself."""
    what: str


@dataclass(slots=True)
class JournalAudit:
    """Counts of a journal, and its broken invariants."""

    accepted: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    queued: int = 0
    findings: list[JournalFinding] = field(default_factory=list)


@dataclass(slots=True)
class _Group:
    task_id: str
    rollouts: dict[str, pb.JournalRollout] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    step: tuple[str, int] | None = None
    is_dropped: bool = False

    def remaining(self) -> list[str]:
        return [name for name in self.rollouts if name not in self.dropped]


def audit_journal(
    objects: Mapping[str, bytes],
    *,
    acknowledged: Collection[str] = (),
    max_staleness: int | None = None,
    steps_per_version: int = 1,
) -> JournalAudit:
    """Audit a run by the objects below its journal prefix."""
    records, broken = _accepted_records(objects)
    judge = _Auditor(max_staleness=max_staleness, steps_per_version=steps_per_version)
    judge.result.findings += broken
    for record in records:
        judge.apply(record)
    judge.close(acknowledged)
    return judge.result


@dataclass(slots=True)
class _Auditor:
    max_staleness: int | None
    steps_per_version: int
    result: JournalAudit = field(default_factory=JournalAudit)
    groups: dict[str, _Group] = field(default_factory=dict)
    tasks: set[str] = field(default_factory=set)
    owner: dict[str, str] = field(default_factory=dict)
    batches: dict[tuple[str, int], list[str]] = field(default_factory=dict)
    stepped: set[tuple[str, int]] = field(default_factory=set)
    versions: dict[tuple[int, int], int] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    sequence: int = 0
    newest: pb.JournalCheckpoint = field(default_factory=lambda: pb.JournalCheckpoint(step=-1))
    """Checkpoint of the epoch."""
    parts: list[bytes] = field(default_factory=list)
    """Of a record that is not complete yet."""

    def report(self, invariant: str, what: str) -> None:
        self.result.findings.append(JournalFinding(invariant, what))

    def apply(self, record: pb.JournalRecord) -> None:
        if record.sequence != self.sequence + 1:
            self.report("log", f"record {record.sequence} follows {self.sequence}")
        self.sequence = record.sequence
        if record.WhichOneof("body") == "part":
            self.part(record.part)
        else:
            self.parts.clear()  # the writer died between two parts: never acknowledged
            self.apply_body(record)

    def part(self, body: pb.JournalPart) -> None:
        if body.number == 0:
            self.parts.clear()
        if body.number != len(self.parts):
            self.report("log", f"part {body.number} of record {self.sequence} has no beginning")
            return
        self.parts.append(body.data)
        if len(self.parts) == body.count:
            data = b"".join(self.parts)
            self.parts.clear()
            try:
                record = pb.JournalRecord.FromString(data)
            except DecodeError as error:
                self.report("log", f"the parts of record {self.sequence} are damaged: {error}")
                return
            self.apply_body(record)

    def apply_body(self, record: pb.JournalRecord) -> None:
        match record.WhichOneof("body"):
            case "admit":
                self.admit(record.admit)
            case "rollout":
                self.rollout(record.rollout)
            case "drop" | "restart":
                self.take_out(record)
            case "batch":
                self.batch(record.batch)
            case "step":
                self.step(record.step)
            case "open" | "checkpoint":
                self.checkpoint(record)
            case "published":
                self.published(record.published)
            case _:
                pass

    def admit(self, body: pb.JournalAdmit) -> None:
        if body.task_id in self.tasks or body.group_id in self.groups:
            self.report("I2", f"task {body.task_id} was admitted twice")
        self.tasks.add(body.task_id)
        self.groups.setdefault(body.group_id, _Group(body.task_id))

    def rollout(self, body: pb.JournalRollout) -> None:
        name, group_id = body.rollout.rollout_id, body.rollout.group_id
        group = self.groups.get(group_id)
        if group is None:
            self.report("I1", f"rollout {name} belongs to group {group_id}, never admitted")
        elif name in self.owner:
            self.report("I2", f"rollout {name} was accepted twice")
        else:
            self.owner[name] = group_id
            group.rollouts[name] = body
            if group.step or group.is_dropped:
                self.report("I1", f"rollout {name} was accepted after its group had ended")

    def take_out(self, record: pb.JournalRecord) -> None:
        if record.HasField("drop"):
            self.drop(record.drop)
        else:
            self.restart(record.restart)

    def drop(self, body: pb.JournalDrop) -> None:
        group = self.groups.get(body.group_id)
        names = [body.rollout_id] if body.rollout_id else group.remaining() if group else []
        is_whole = body.rollout_id == ""
        if body.reason not in REASONS or (
            body.reason not in EITHER and is_whole != (body.reason in WHOLE)
        ):
            self.report("I1", f"group {body.group_id} was dropped for {body.reason!r}")
        if group is not None and group.step and body.reason in REPEATING:
            self.drop_trained(group, body)
            return
        if group is None or group.step or group.is_dropped:
            self.report("I1", f"group {body.group_id} was dropped, but it was not queued")
            return
        for name in names:
            if name not in group.rollouts or name in group.dropped:
                self.report("I1", f"rollout {name} was dropped, but it was not queued")
            group.dropped.add(name)
            self.result.dropped[body.reason] += 1
        group.is_dropped = not body.rollout_id

    def drop_trained(self, group: _Group, body: pb.JournalDrop) -> None:
        if body.rollout_id not in group.remaining():
            self.report("I1", f"rollout {body.rollout_id} was dropped, but it was not trained")
            return
        group.dropped.add(body.rollout_id)
        self.result.trained -= 1
        self.result.dropped[body.reason] += 1

    def restart(self, body: pb.JournalRestart) -> None:
        group = self.groups.get(body.group_id)
        if group is None or group.step or group.is_dropped:
            self.report("I1", f"group {body.group_id} is drawn again, but it was not queued")
        elif group.remaining():
            self.report("I1", f"group {body.group_id} is drawn again beside finished rollouts")

    def batch(self, body: pb.JournalBatch) -> None:
        step, names = (body.phase, body.step), list(body.group_ids)
        if step in self.batches:
            if self.batches[step] != names:
                self.report("I4", f"step {step} was batched again with other groups")
            return
        last = max((n for phase, n in self.batches if phase == body.phase), default=0)
        if body.step != last + 1:
            self.report("I4", f"batch {body.step} of {body.phase} follows batch {last}")
        self.batches[step] = names
        if self.versions:
            newest = max(self.versions.values())
            done = (body.step - 1) // self.steps_per_version * self.steps_per_version
            self.starts.setdefault(body.phase, newest - done)
        for name in names:
            self.train(name, step)

    def train(self, name: str, step: tuple[str, int]) -> None:
        group = self.groups.get(name)
        if group is None or group.is_dropped or not group.rollouts:
            self.report("I1", f"step {step} trains group {name}, which is not queued")
            return
        if group.step is not None:
            self.report("I2", f"group {name} is trained in {group.step} and in {step}")
            return
        group.step = step
        indices: set[int] = set()
        for rollout_id in group.remaining():
            body = group.rollouts[rollout_id]
            if body.rollout.index in indices:
                self.report(
                    "I2", f"step {step} trains sibling {body.rollout.index} of {name} twice"
                )
            indices.add(body.rollout.index)
            if body.reward.WhichOneof("result") != "reward":
                self.report("I1", f"step {step} trains {rollout_id}, which has no reward")
            self.result.trained += 1
            self.check_staleness(body, step)

    def check_staleness(self, body: pb.JournalRollout, step: tuple[str, int]) -> None:
        if self.max_staleness is None or step[0] not in self.starts:
            return
        start, trained = self.starts[step[0]], step[1] - 1
        oldest, newest = body.rollout.oldest, body.rollout.newest
        name = body.rollout.rollout_id
        for version in (oldest, newest):
            if (version.epoch, version.number) not in self.versions:
                self.report("I3", f"{name} used version {version.number}, not published before")
                return
        at = max(self.versions[oldest.epoch, oldest.number] - start, 0)
        staleness = trained // self.steps_per_version - at // self.steps_per_version
        if staleness > self.max_staleness:
            self.report("I3", f"{name} is {staleness} versions old in step {step}")

    def step(self, body: pb.JournalStep) -> None:
        step = (body.phase, body.step)
        if any(phase == body.phase for phase, _ in self.batches) and step not in self.batches:
            self.report("I4", f"step {step} has no batch")
        self.stepped.add(step)

    def published(self, body: pb.JournalPublished) -> None:
        if self.versions and body.number <= max(number for _, number in self.versions):
            self.report("I3", f"version {body.number} was published after a higher number")
        self.versions[body.epoch, body.number] = body.step

    def checkpoint(self, record: pb.JournalRecord) -> None:
        if record.HasField("open"):
            self.newest = pb.JournalCheckpoint(step=-1)  # it may return to an older one
            return
        body, before = record.checkpoint, self.newest
        is_same = (body.step, body.manifest_digest) == (before.step, before.manifest_digest)
        if body.step <= before.step and not is_same:
            self.report("I5", f"the checkpoint of step {body.step} follows that of {before.step}")
        if not body.manifest_digest or not body.uri:
            self.report("I5", f"the checkpoint of step {body.step} names no manifest")
        self.newest = body

    def close(self, acknowledged: Collection[str]) -> None:
        result = self.result
        result.accepted = len(self.owner)
        result.queued = sum(
            len(g.remaining()) for g in self.groups.values() if g.step is None and not g.is_dropped
        )
        spent = result.trained + result.dropped.total() + result.queued
        if result.accepted != spent:
            self.report("I1", f"{result.accepted} accepted, {spent} trained, dropped or queued")
        for name in sorted(set(acknowledged) - self.owner.keys()):
            self.report("I1", f"rollout {name} was acknowledged and is lost")
        last = {phase: max(n for p, n in self.batches if p == phase) for phase, _ in self.batches}
        for step in self.batches:
            if step not in self.stepped and step[1] < last[step[0]]:
                self.report("I4", f"batch {step} was never trained, and later ones were")


def _accepted_records(
    objects: Mapping[str, bytes],
) -> tuple[list[pb.JournalRecord], list[JournalFinding]]:
    """Records of the accepted chain of epochs, oldest first."""
    epochs: dict[int, list[pb.JournalRecord]] = {}
    findings: list[JournalFinding] = []
    for key in sorted(objects):
        if not key.startswith(JOURNAL):
            continue
        try:
            for record in _records(objects[key]):
                epochs.setdefault(int(key.split("/")[1]), []).append(record)
        except (ValueError, struct.error, DecodeError) as error:
            findings.append(JournalFinding("log", f"{key}: {error}"))
    chain: list[list[pb.JournalRecord]] = []
    epoch, last = max(epochs, default=0), None
    while epoch in epochs:
        mine = [r for r in epochs[epoch] if last is None or r.sequence <= last]
        chain.append(mine)
        head = mine[0].open if mine else pb.JournalOpen()
        if not mine or mine[0].WhichOneof("body") != "open" or head.previous_epoch >= epoch:
            findings.append(JournalFinding("log", f"epoch {epoch} does not open with OPEN"))
            break
        epoch, last = head.previous_epoch, head.previous_sequence
    return [record for part in reversed(chain) for record in part], findings


def _records(data: bytes) -> Iterator[pb.JournalRecord]:
    for _, payload in read_frames(data):
        yield pb.JournalRecord.FromString(payload)


def read_frames(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Kind and payload of each record of a segment.

    Raises:
        ValueError: it is damaged.
    """
    if data[:4] != b"ETWL":
        raise ValueError("is not a journal segment")
    place = 20 + int.from_bytes(data[18:20], "little") + 4
    while place < len(data):
        length, crc = struct.unpack_from("<II", data, place)
        end = place + 17 + length
        if zlib.crc32(data[place + 8 : end]) != crc or end > len(data):
            raise ValueError(f"the record at byte {place} is damaged")
        if data[place + 8] != 255:
            yield data[place + 8], data[place + 17 : end]
        place = end
