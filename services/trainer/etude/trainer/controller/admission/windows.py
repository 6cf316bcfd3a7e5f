"""Windows of production rollouts: whether one is trained, its slices, and its rollouts.

A window is admitted as groups, its slices, one for each optimiser step. The journal names each
rollout with its reward, and has none of its tokens: an erasure deletes them in the feedback store
alone, and a step that is trained again after it goes without them.
"""

import asyncio
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from etude.common.api.run.phases import MAX_RELEASE_LAG, FeedbackSource
from etude.common.blobs import MissingError, Store
from etude.common.errors import CorruptError, InvalidFieldError
from etude.common.feedback import windows
from etude.common.feedback.windows import WindowManifest, WindowRollout
from etude.common.store_retry import StoreRetry
from etude.common.weights import VersionId
from etude.trainer.contents.rollout_checks import InvalidSpanError
from etude.trainer.controller.admission.groups import RolloutGroup
from etude.trainer.learner.batches import PolicyBatch, links_of
from etude.trainer.seeding import derive_seed, permute_index
from etude.v1 import journal_pb2, rewards_pb2, rollout_pb2

READS_AT_ONCE = 16
"""Rollouts that are read at the same time: each takes two requests."""

_SLICE = re.compile(r"#([0-9]+)/([0-9]+)")


class Refusal(NamedTuple):
    """Reason not to train a window."""

    reason: str
    """Of its DROP records."""
    sentence: str
    is_counted: bool = True
    """False if its rollouts are another run's to account for."""


class WindowSlice(NamedTuple):
    """The rollouts of one optimiser step."""

    task_id: str
    """By which it is admitted once."""
    group_id: str
    members: tuple[int, ...]
    """Places in the window's manifest."""


def task_id(uri: str, number: int, *, place: int, count: int) -> str:
    """Name a slice; it is admitted under this name in any phase of the run."""
    return f"{uri.rstrip('/')}/{windows.window_key(number)}#{place}/{count}"


def count_admitted(consumed: Iterable[str], uri: str) -> dict[int, int]:
    """Number of slices, by the number of each window that was admitted at least in part."""
    prefix = f"{uri.rstrip('/')}/{windows.WINDOWS}"
    found: dict[int, int] = {}
    for name in consumed:
        if name.startswith(prefix):
            key, _, tail = name.removeprefix(prefix).partition(".json")
            slice_of = _SLICE.fullmatch(tail)
            if slice_of and key.isdecimal():
                found[int(key)] = int(slice_of[2])
    return found


def cut_window(
    number: int, size: int, *, count: int, uri: str, phase: str, seed: int
) -> list[WindowSlice]:
    """Cut a window at random into slices of nearly equal size.

    Args:
        number: of the window.
        size: rollouts that it lists.
        count: slices.
        uri: of its store.
        phase: name of the phase that trains it.
        seed: of the phase.
    """
    drawn = derive_seed(seed, "window", number)
    order = [permute_index(place, size=size, seed=drawn) for place in range(size)]
    return [
        WindowSlice(
            task_id(uri, number, place=place, count=count),
            f"{phase}-window-{number:06d}-{place}",
            tuple(sorted(order[place::count])),
        )
        for place in range(count)
    ]


def release_lag(versions: Mapping[VersionId, int], policy: VersionId) -> int:
    """Later states of the weights that were published.

    Args:
        versions: step of each published version.
        policy: one of them.
    """
    return len({step for step in versions.values() if step > versions[policy]})


def find_refusal(
    manifest: WindowManifest,
    source: FeedbackSource,
    *,
    run_uid: str,
    versions: Mapping[VersionId, int],
    now_s: float,
) -> Refusal | None:
    """Find the first reason not to train a window, by its manifest alone; None if there is none."""
    if manifest.run_uid != run_uid:
        sentence = f"its rollouts are of run {manifest.run_uid}"
        return Refusal("other_policy", sentence, is_counted=False)
    if manifest.policy not in versions:
        return Refusal("other_policy", f"version {manifest.policy} is none of this run's chain")
    if manifest.is_frozen:
        return Refusal("frozen_window", f"frozen: {'; '.join(manifest.findings) or 'no finding'}")
    lag = release_lag(versions, manifest.policy)
    if lag > MAX_RELEASE_LAG:
        return Refusal("stale", f"version {manifest.policy} is {lag} releases behind")
    age_s = now_s - manifest.closed_ms / 1000
    if age_s > source.max_age_seconds:
        sentence = f"closed {age_s:.0f} s ago, more than maxAgeSeconds {source.max_age_seconds}"
        return Refusal("expired", sentence)
    return check_size(len(manifest.rollouts), source)


def check_size(usable: int, source: FeedbackSource) -> Refusal | None:
    """Find out whether a window has too few rollouts."""
    if usable >= source.min_rollouts:
        return None
    sentence = f"{usable} usable rollouts, fewer than minRollouts {source.min_rollouts}"
    return Refusal("too_few_rollouts", sentence)


def journal_rollout(
    manifest: WindowManifest, index: int, *, group: RolloutGroup
) -> journal_pb2.JournalRollout:
    """Build the journal's record of a rollout, without its content."""
    entry = manifest.rollouts[index]
    policy = manifest.policy.to_proto()
    return journal_pb2.JournalRollout(
        rollout=rollout_pb2.Rollout(
            rollout_id=entry.rollout,
            group_id=group.group_id,
            task_id=group.task_id,
            index=index,
            oldest=policy,
            newest=policy,
        ),
        reward=rewards_pb2.RewardRecord(rollout_id=entry.rollout, reward=entry.reward),
    )


Contents = Mapping[int, rollout_pb2.Rollout]
"""Rollouts of a window, by their places in its manifest."""


class ReadRollouts(NamedTuple):
    """Rollouts of a window, by their places in its manifest."""

    contents: Contents
    masked: Mapping[int, str]
    """Reason for each that cannot be trained."""


Check = Callable[[rollout_pb2.Rollout], None]
"""Raises InvalidFieldError for a rollout that cannot be trained."""


@dataclass(slots=True)
class WindowReader:
    """Reads a feedback store; waits for it while it is away."""

    store: Store
    store_retry: StoreRetry
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(READS_AT_ONCE))

    async def find_next(self, after: int) -> int | None:
        """Find the window behind one; None if there is none yet."""

        def find() -> int | None:
            return next(windows.list_windows(self.store, after=after), None)

        return await self.store_retry.retry("windows", lambda: asyncio.to_thread(find))

    async def read_window(self, number: int) -> WindowManifest:
        """Read a window.

        Raises:
            CorruptError: it is damaged, gone, or lists a rollout twice.
        """
        try:
            manifest = await self.store_retry.retry(
                f"window {number}",
                lambda: asyncio.to_thread(windows.read_window, self.store, number),
            )
        except MissingError as cause:
            raise CorruptError(str(cause)) from cause
        if len({entry.rollout for entry in manifest.rollouts}) < len(manifest.rollouts):
            raise CorruptError(f"{self.store.url}: window {number} lists a rollout twice")
        return manifest

    async def read_rollouts(
        self, manifest: WindowManifest, indices: Iterable[int], check: Check
    ) -> ReadRollouts:
        """Read rollouts of a window, each checked."""

        async def read(entry: WindowRollout) -> rollout_pb2.Rollout | str:
            async with self._slots:
                return await self.store_retry.retry(
                    f"rollout {entry.rollout}",
                    lambda: asyncio.to_thread(self._read_rollout, entry, check),
                )

        places = list(indices)
        found = await asyncio.gather(*(read(manifest.rollouts[place]) for place in places))
        read_places = list(zip(places, found, strict=True))
        return ReadRollouts(
            {place: each for place, each in read_places if not isinstance(each, str)},
            {place: each for place, each in read_places if isinstance(each, str)},
        )

    def _read_rollout(self, entry: WindowRollout, check: Check) -> rollout_pb2.Rollout | str:
        """Read one rollout; a reason if it cannot be trained."""
        try:
            rollout = windows.read_rollout(self.store, entry)
            check(rollout)
        except MissingError:
            return "erased"
        except InvalidSpanError:
            return "invalid_span"
        except (CorruptError, InvalidFieldError):
            return "damaged"
        return rollout


def build_window_batch(
    manifest: WindowManifest,
    contents: Contents,
    indices: Sequence[int],
    *,
    current: Collection[VersionId],
) -> PolicyBatch:
    """Build the learner's batch of rollouts, with the advantages that their window gives.

    Args:
        manifest: of the window.
        contents: rollouts by their places in it.
        indices: places of the rollouts of the batch.
        current: versions with exactly the weights of the step.
    """
    entries = [manifest.rollouts[index] for index in indices]
    return PolicyBatch(
        sequences=tuple(
            sequence
            for place, index in enumerate(indices)
            for sequence in links_of(contents[index], index=place, current=current)
        ),
        rewards=np.asarray([entry.reward for entry in entries], dtype=np.float64),
        groups=np.zeros(len(entries), dtype=np.int64),
        valid=np.ones(len(entries), dtype=np.bool_),
        advantages=np.asarray([entry.advantage for entry in entries], dtype=np.float64),
    )
