"""The pause of a swap: committing prepared changes against vLLM's sparse loader and plain copies.

All change the same tensors from the same old version to the same new one. vLLM's loader is called
as its own receivers do, on flat tensors, without the check for duplicates.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)

from etude.common.weights.replicas.patches import PreparedPatches
from etude.common.weights.tensors.changes import changed_places
from etude.common.weights.tensors.words import Words
from weights_bench.clock import Cost, cost
from weights_bench.contender import copies, overwrite
from weights_bench.measure import check
from weights_bench.ours import L1
from weights_bench.trajectory import Trajectory

MEMCPY, VLLM = "memcpy of the model", "vLLM sparse loader"
COMMIT, UNDO, PREPARE = "commit", "undo", "prepare and commit"


class _Changes(NamedTuple):
    """One tensor's changes, decoded and ready, for all who have no receiver of their own."""

    name: str
    live: Tensor
    """bf16. [n]"""
    whole: Tensor
    """The new version. [n]"""
    places: Tensor
    """int64, which torch's own scatters want. [k]"""
    values: Tensor
    """[k]"""

    def patch(self) -> CheckpointWeightPatch:
        """The same for vLLM."""
        shape = tuple(self.live.shape)
        return CheckpointWeightPatch(
            self.name, shape, torch.bfloat16, self.values, self.places.int()
        )


class _Peers:
    """Live weights that are changed by other people's means."""

    def __init__(self, trajectory: Trajectory) -> None:
        self._trajectory = trajectory
        self._words = copies(trajectory.old)
        specs = trajectory.schema.tensors
        sides = zip(specs, self._words, trajectory.old, trajectory.new, strict=True)
        self._changes = [
            _Changes(
                spec.name,
                _tensor(live),
                _tensor(new),
                torch.from_numpy(places),
                _tensor(new[places]),
            )
            for spec, live, old, new in sides
            for places in [changed_places(old, new)]
        ]
        self._patches = [each.patch() for each in self._changes]
        self._by_name = {each.name: each.live for each in self._changes}

    def reset(self) -> None:
        """Return to the old version."""
        overwrite(self._words, self._trajectory.old)

    def live(self) -> tuple[Words, ...]:
        """What they have made of it."""
        return self._words

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """As much of a model as vLLM's loader wants."""
        return {self._load(name, tensor) for name, tensor in weights}

    def _load(self, name: str, tensor: Tensor) -> str:
        self._by_name[name].copy_(tensor)
        return name

    def ways(self) -> dict[str, Callable[[], None]]:
        """How to get to the new version."""
        return {
            MEMCPY: lambda: overwrite(self._words, self._trajectory.new),
            "torch copy_": self._copy,
            "torch index_copy_": self._index_copy,
            "torch index_put_": self._index_put,
            VLLM: self._vllm,
        }

    def _copy(self) -> None:
        for each in self._changes:
            each.live.copy_(each.whole)

    def _index_copy(self) -> None:
        for each in self._changes:
            each.live.index_copy_(0, each.places, each.values)

    def _index_put(self) -> None:
        for each in self._changes:
            each.live.index_put_((each.places,), each.values)

    def _vllm(self) -> None:
        load_checkpoint_weight_patches(self, self._patches, validate_unique_indices=False)


def costs(trajectory: Trajectory, *, repeats: int) -> dict[str, Cost]:
    """What each way costs; each is checked bit for bit. bf16 trajectories only."""
    peers = _Peers(trajectory)
    found = {}
    for name, way in peers.ways().items():
        found[name] = cost(way, before=peers.reset, repeats=repeats)
        check(name, peers.live(), trajectory)
    del peers
    return found | _ours(trajectory, repeats)


def _ours(trajectory: Trajectory, repeats: int) -> dict[str, Cost]:
    """Prepared by our receiver: old values gathered, new ones computed, the digest foretold."""
    receiver = L1.receiver(trajectory)
    sent = L1.send(trajectory)
    blocks = receiver.decoded(sent)
    held: list[PreparedPatches] = []

    def ready() -> None:
        receiver.reset()
        held[:] = [receiver.prepared(blocks, sent)]

    def both() -> None:
        receiver.commit(receiver.prepared(blocks, sent))

    found = {COMMIT: cost(lambda: receiver.commit(held[0]), before=ready, repeats=repeats)}
    check(COMMIT, receiver.live(), trajectory)
    found[UNDO] = cost(lambda: receiver.undo(held[0]), repeats=repeats)
    check(UNDO, receiver.live(), replace(trajectory, new=trajectory.old))
    found[PREPARE] = cost(both, before=receiver.reset, repeats=repeats)
    check(PREPARE, receiver.live(), trajectory)
    return found


def _tensor(words: Words) -> Tensor:
    """The same memory as bf16."""
    return torch.from_numpy(words).view(torch.bfloat16)
