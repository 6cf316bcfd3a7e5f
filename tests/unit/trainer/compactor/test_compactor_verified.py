"""What a compactor leaves of a run is proved sound, and damage in it is still found."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etude.cli.weights.verification import UNPROVABLE, verify
from etude.common.blobs import MemoryStore
from etude.common.weights import VersionId
from etude.common.weights.protocol.listing import take_listing

MakeCompactor = Callable[..., Any]

KEYFRAME = VersionId(1, 12)
HEADLESS = [VersionId(1, 10), VersionId(1, 11)]
"""They stay for readers that have them; the keyframe before them was collected."""


@pytest.fixture
def collected(trained: Any, keep: MakeCompactor) -> MemoryStore:
    store: MemoryStore = trained.store
    compactor = keep(store, every=4, retainVersions=3, retainKeyframes=1)
    for number in range(1, 13):
        trained.publish(number)
        assert compactor.run_round().failures == ()
    assert take_listing(store).keyframes.keys() == {KEYFRAME}
    return store


def test_a_collected_run_has_no_damage_and_says_what_nothing_leads_to(
    collected: MemoryStore, tmp_path: Path
) -> None:
    found = list(verify(collected, tmp_path))
    assert [verdict.problem for verdict in found if verdict.problem] == []
    assert [verdict.version for verdict in found if verdict.way == UNPROVABLE] == HEADLESS
    assert [verdict.version for verdict in found if verdict.way == "keyframe"] == [KEYFRAME] * 2


def test_a_keyframe_that_is_damaged_or_gone_is_not_taken_for_a_collected_one(
    collected: MemoryStore, tmp_path: Path
) -> None:
    [part] = [info.key for info in take_listing(collected).keyframes[KEYFRAME].parts]
    data = collected.objects.pop(part)
    gone = [v.version for v in verify(collected, tmp_path / "gone") if v.problem]
    assert KEYFRAME in gone
    collected.objects[part] = bytes([data[0] ^ 1]) + data[1:]
    damaged = [v.version for v in verify(collected, tmp_path / "damaged") if v.problem]
    assert KEYFRAME in damaged
    for info in take_listing(collected).keyframes[KEYFRAME].objects:
        collected.objects.pop(info.key)
    lost = [v.version for v in verify(collected, tmp_path / "lost") if v.problem]
    assert lost == [*HEADLESS, KEYFRAME]


def test_a_run_that_lost_its_beginning_is_damaged(trained: Any, tmp_path: Path) -> None:
    store: MemoryStore = trained.store
    trained.publish(1)
    store.objects.pop(VersionId(1, 0).manifest_key)
    assert [v.version for v in verify(store, tmp_path) if v.problem] == [VersionId(1, 1)]
