"""Legal runs of a controller, drawn at random: their journal, their ledger and their audit."""

import copy
import random
from dataclasses import dataclass, field

from etude.common.durable_log import encode_segment
from etude.trainer.controller.journal import segments
from etude.trainer.controller.journal.audit import JournalAudit, audit_journal
from etude.trainer.controller.journal.ledger import REDRAWN, Ledger, StepId
from etude.v1 import journal_pb2 as pb
from etude.v1.rewards_pb2 import RewardFault, RewardRecord
from etude.v1.rollout_pb2 import Rollout
from etude.v1.weights_pb2 import PolicyVersion

GROUP_SIZE = 3
PER_STEP = 2
STALENESS = 1


@dataclass
class History:
    """A legal run, step by step, with its ledger."""

    records: list[pb.JournalRecord] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    admitted: int = 0
    steps: int = 0
    acknowledged: list[str] = field(default_factory=list)

    def add(self, record: pb.JournalRecord) -> None:
        record.sequence = len(self.records) + 1
        self.records.append(record)
        self.ledger.apply(copy.deepcopy(record))

    def open(self) -> None:
        self.add(pb.JournalRecord(open=pb.JournalOpen(epoch=1)))
        self.publish()

    def publish(self) -> None:
        body = pb.JournalPublished(epoch=1, number=self.steps, step=100 + self.steps)
        self.add(pb.JournalRecord(published=body))

    def admit(self) -> str:
        name = f"g{self.admitted}"
        body = pb.JournalAdmit(
            group_id=name, phase="rl", position=self.admitted, task_id=f"t{self.admitted}"
        )
        self.admitted += 1
        self.add(pb.JournalRecord(admit=body))
        return name

    def finish(self, group: str, *, faults: int = 0) -> None:
        version = PolicyVersion(epoch=1, number=self.steps)
        for index in range(GROUP_SIZE):
            name = f"{group}-{index}"
            rollout = Rollout(
                rollout_id=name, group_id=group, index=index, oldest=version, newest=version
            )
            fault = RewardFault(reason="INFRA") if index < faults else None
            reward = RewardRecord(rollout_id=name, fault=fault) if fault else RewardRecord(reward=1)
            body = pb.JournalRollout(rollout=rollout, reward=reward)
            self.add(pb.JournalRecord(rollout=body))
            self.acknowledged.append(name)
        for index in range(faults):
            reason = "invalid_span" if index % 2 else "platform"
            self.take_out(group, f"{group}-{index}", reason)

    def take_out(self, group: str, name: str, reason: str) -> None:
        drop = pb.JournalDrop(group_id=group, rollout_id=name, reason=reason)
        self.add(pb.JournalRecord(drop=drop))

    def draw_again(self, group: str, index: int, reason: str, *, times: int) -> None:
        """Drop a sibling that was sound, as often as told, and accept another in its place."""
        name = f"{group}-{index}"
        for drawn in range(1, times + 1):
            self.take_out(group, name, reason)
            name = f"{group}-{index}-again{drawn}"
            version = PolicyVersion(epoch=1, number=self.steps)
            rollout = Rollout(
                rollout_id=name, group_id=group, index=index, oldest=version, newest=version
            )
            record = pb.JournalRollout(rollout=rollout, reward=RewardRecord(reward=drawn))
            self.add(pb.JournalRecord(rollout=record))
            self.acknowledged.append(name)

    def drop(self, group: str) -> None:
        self.add(pb.JournalRecord(drop=pb.JournalDrop(group_id=group, reason="stale")))

    def train(self, groups: list[str]) -> None:
        self.steps += 1
        batch = pb.JournalBatch(phase="rl", step=self.steps, group_ids=groups)
        self.add(pb.JournalRecord(batch=batch))
        self.ledger.forget_batch(StepId("rl", self.steps))
        self.add(pb.JournalRecord(step=pb.JournalStep(phase="rl", step=self.steps)))
        self.publish()


def history(seed: int, *, steps: int = 6) -> History:
    draw = random.Random(seed)
    made = History()
    made.open()
    for _ in range(steps):
        groups = [made.admit() for _ in range(PER_STEP + draw.randint(0, 1))]
        for name in draw.sample(groups, len(groups)):
            made.finish(name, faults=draw.choice([0, 0, 1, 2]))
            if draw.random() < 0.3:
                made.draw_again(
                    name, GROUP_SIZE - 1, draw.choice(sorted(REDRAWN)), times=draw.randint(1, 2)
                )
        for name in groups[PER_STEP:]:
            made.drop(name)
        made.train(groups[:PER_STEP])
    made.finish(made.admit())
    made.admit()
    return made


def packed(records: list[pb.JournalRecord], *, renumber: bool = True) -> dict[str, bytes]:
    frames = []
    for place, record in enumerate(records, start=1):
        if renumber:
            record.sequence = place
        frames.append(segments.encode_record(record))
    objects = {}
    for start in range(0, len(frames), 7):
        data = encode_segment("u", 1, first=start + 1, frames=frames[start : start + 7])
        objects[f"journal/000001/{start + 1:012d}.wal"] = data
    return objects


def judged(made: History, records: list[pb.JournalRecord] | None = None) -> JournalAudit:
    return audit_journal(
        packed(made.records if records is None else records),
        acknowledged=made.acknowledged,
        max_staleness=STALENESS,
    )
