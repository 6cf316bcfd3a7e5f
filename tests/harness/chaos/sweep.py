"""What is left in the store at the end: all that is named, and nothing else."""

import tempfile
from pathlib import Path
from typing import NamedTuple

from etude.cli.weights import verification
from etude.common import weights
from etude.common.blobs import Store
from etude.common.errors import CorruptError
from etude.common.weights import GarbageCollector, Retention
from etude.common.weights.protocol import retention
from etude.common.weights.protocol.epochs import latest_epoch
from etude.common.weights.protocol.listing import take_listing
from etude.common.weights.protocol.versions import (
    DELTAS,
    KEYFRAMES,
    SKIPS,
    TRASH,
    list_all_published,
)

ROUNDS = 20


class Left(NamedTuple):
    """Keys that should not be there, or should."""

    unreferenced: list[str]
    missing: list[str]
    wrong: list[str]
    """Ways to versions that do not lead to what was published."""


def sweep(store: Store) -> Left:
    """Collect until nothing goes any more, then compare what is named with what is there."""
    latest = latest_epoch(store)
    assert latest is not None
    collector = GarbageCollector(
        store=store,
        epoch=latest.epoch,
        resumable=list,
        retention=Retention(versions=1, keyframes=1),
    )
    grace, retention.ORPHAN_S = retention.ORPHAN_S, 0.0  # nobody uploads any more
    try:
        for _ in range(ROUNDS):
            if not collector.collect():
                break
    finally:
        retention.ORPHAN_S = grace
    named = _named(store)
    there = {info.key for prefix in (DELTAS, SKIPS, KEYFRAMES) for info in store.list(prefix)}
    there -= {key for key in there if key.endswith(".json")}
    left_over = sorted(there - named) + [info.key for info in store.list(TRASH)]
    with tempfile.TemporaryDirectory() as folder:
        verdicts = list(verification.verify(store, Path(folder)))
    wrong = [f"{each.version} by {each.way}: {each.problem}" for each in verdicts if each.problem]
    return Left(left_over, sorted(named - there), wrong)


def _named(store: Store) -> set[str]:
    """Payloads that manifests, skips and keyframes name."""
    named: set[str] = set()
    for version in list_all_published(store):
        try:
            named |= {item.key for item in weights.read_manifest(store, version).objects}
        except CorruptError:  # flipped at rest: what is not readable names nothing
            continue
    listing = take_listing(store)
    for version, keyframe in listing.keyframes.items():
        if keyframe.record is not None:
            named |= {item.key for item in weights.read_keyframe(store, version).objects}
    for span, skip in listing.skips.items():
        if skip.record is not None:
            named |= {item.key for item in weights.read_skip(store, *span).objects}
    return named
