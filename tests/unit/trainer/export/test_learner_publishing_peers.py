"""A rank that cannot pack its part of a version does not leave its peers waiting."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from etude.common.blobs import Store
from etude.common.weights import VersionId
from etude.trainer.export.publisher import Publisher
from etude.trainer.export.receipts import PeerFailedError, RankReceipt
from etude.trainer.export.shard_packer import PackedShard, ShardPacker
from etude.trainer.model.fsdp import RankGroup

PATIENCE_S = 60.0
"""For a peer; collectives of real ranks wait much longer."""


@dataclass
class Meeting:
    """Where two ranks add up their numbers."""

    barrier: Barrier = field(default_factory=lambda: Barrier(2, timeout=PATIENCE_S))
    given: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads(RankGroup):
    """A rank that is a thread of this process."""

    meeting: Meeting

    @override
    def total(self, values: Tensor) -> Tensor:
        meeting = self.meeting
        meeting.given.append(values)
        meeting.barrier.wait()
        found = torch.stack(meeting.given[-2:]).sum(0)
        meeting.barrier.wait()
        return found


def encode(publisher: Publisher) -> RankReceipt | Exception:
    try:
        return publisher.encode(VersionId(1, 0), None)
    except (MemoryError, PeerFailedError) as error:
        return error


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_while_it_packs_fails_all_of_them_at_once(
    build: Any, store: Store, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    learner, meeting = build(), Meeting()
    publishers = [
        Publisher(
            learner.policy,
            Threads(rank=rank, size=2, device=torch.device("cpu"), meeting=meeting),
            store=store,
            settings=learner._config.weights,
        )
        for rank in range(2)
    ]
    broken = publishers[failing]._get_packer()
    healthy = ShardPacker.pack

    def packed(share: ShardPacker, *arguments: Any, **named: Any) -> PackedShard:
        if share is broken:
            raise MemoryError("no room for the blocks")
        return healthy(share, *arguments, **named)

    with ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(ShardPacker, "pack", packed)
        errors = list(pool.map(encode, publishers))
        assert isinstance(errors[failing], MemoryError)
        assert isinstance(errors[1 - failing], PeerFailedError)
        assert not list(store.list("weights/deltas/"))
        # Nobody was left behind: the next try has both of them, and gives a whole version.
        monkeypatch.undo()
        receipts = list(pool.map(encode, publishers))
    assert all(isinstance(found, RankReceipt) and found.is_complete for found in receipts)
