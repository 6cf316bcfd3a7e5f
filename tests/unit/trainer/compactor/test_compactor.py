"""The compactor shortens the chain: keyframes and skips that are bit for bit what was published."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etude.common import weights
from etude.common.errors import FencedError
from etude.common.weights import VersionId
from etude.common.weights.protocol.folded import read_skip
from etude.common.weights.protocol.listing import take_listing
from etude.common.weights.replicas.mirror import Mirror

MakeCompactor = Callable[..., Any]


def keyframes(store: Any) -> list[VersionId]:
    found = take_listing(store).keyframes
    return sorted(version for version, each in found.items() if each.record is not None)


def skips(store: Any) -> list[tuple[int, int]]:
    found = take_listing(store).skips
    return sorted((b.number, t.number) for (b, t), each in found.items() if each.record)


@pytest.mark.parametrize(("every", "steps"), [(3, 1), (7, 2)])
def test_a_keyframe_is_written_after_so_many_steps(
    trained: Any, keep: MakeCompactor, every: int, steps: int
) -> None:
    compactor = keep(trained.store, every=every, stepsPerVersion=steps)
    for number in range(1, 8):
        trained.publish(number)
        compactor.run_round()
    assert keyframes(trained.store) == [VersionId(1, 3), VersionId(1, 6)]


def test_a_keyframe_is_written_once_deltas_add_up_to_a_share_of_the_last(
    trained: Any, keep: MakeCompactor
) -> None:
    compactor = keep(trained.store, chainRatio="0.2")
    sizes = [trained.publish(number).num_bytes for number in range(1, 4)]
    whole = weights.read_manifest(trained.store, VersionId(1, 0)).num_bytes
    assert sum(sizes) < 0.2 * whole
    compactor.run_round()
    assert keyframes(trained.store) == []
    number = 3
    while sum(sizes) < 0.2 * whole:
        number += 1
        sizes.append(trained.publish(number).num_bytes)
        compactor.run_round()
    assert keyframes(trained.store) == [VersionId(1, number)]


@pytest.mark.parametrize("part_bytes", [1 << 20, 20_000, 900])
def test_a_keyframe_is_the_version_bit_for_bit_in_parts_of_bounded_size(
    trained: Any, keep: MakeCompactor, tmp_path: Path, part_bytes: int
) -> None:
    compactor = keep(trained.store, every=2, part_bytes=part_bytes)
    trained.publish(1)
    trained.publish(2)
    report = compactor.run_round()
    record = weights.read_keyframe(trained.store, VersionId(1, 2))
    dense = max(part_bytes, 2 * 128 * 2)
    assert all(item.size <= 1.1 * dense + 1000 for item in record.objects)
    assert trained.is_state(VersionId(1, 2), record.target.state)
    assert [(w.kind, w.target) for w in report.written] == [("keyframe", VersionId(1, 2))]
    for number in (0, 1):  # nothing but the keyframe leads there now
        prefix = f"weights/deltas/000001/{number:012d}/"
        trained.store.delete([info.key for info in trained.store.list(prefix)])
    mirror = Mirror(trained.store, tmp_path / "reader")
    assert [edge.kind for edge in mirror.move_to(VersionId(1, 2))] == ["keyframe"]
    assert trained.is_in(mirror)


@pytest.mark.parametrize("codec", ["L1", "L2", "L2r"])
@pytest.mark.parametrize("part_bytes", [1 << 20, 6_000])
def test_a_skip_leads_from_one_version_to_another_bit_for_bit(
    trained: Any, keep: MakeCompactor, tmp_path: Path, codec: str, part_bytes: int
) -> None:
    compactor = keep(trained.store, skips=[4], codec=codec, part_bytes=part_bytes)
    reader = Mirror(trained.store, tmp_path / "reader")
    reader.move_to(VersionId(1, 0))
    compactor.run_round()
    for number in range(1, 10):
        trained.publish(number, density=0.02)
        compactor.run_round()
    assert skips(trained.store) == [(0, 4), (4, 8)]
    written = read_skip(trained.store, VersionId(1, 0), VersionId(1, 4)).stats.codecs
    cut = {"L1"} if part_bytes == 6_000 else set()  # a tile in two parts takes L1
    assert written.keys() & {"L1", "L2", "L2R"} == {codec.upper()} | cut
    assert [edge.kind for edge in reader.move_to(VersionId(1, 8))] == ["skip", "skip"]
    assert trained.is_in(reader)


def test_skips_of_all_strides_come_out_when_the_compactor_catches_up_at_once(
    trained: Any, keep: MakeCompactor
) -> None:
    for number in range(1, 18):
        trained.publish(number)
    compactor = keep(trained.store, skips=[4, 8])
    compactor._open_copy().move_to(VersionId(1, 0))
    compactor._handle_arrival(compactor._open_copy())
    compactor.run_round()
    assert skips(trained.store) == [(0, 4), (0, 8), (4, 8), (8, 12), (8, 16), (12, 16)]


def test_a_skip_over_too_many_changes_is_given_up(trained: Any, keep: MakeCompactor) -> None:
    compactor = keep(trained.store, skips=[4, 8])
    compactor.run_round()
    for number in range(1, 9):
        trained.publish(number, density=0.04)
        compactor.run_round()
    assert skips(trained.store) == [(0, 4), (4, 8)]
    assert not (compactor._config.folder / "skips" / "8" / "old").stat().st_blocks


def test_what_was_changed_and_changed_back_is_not_in_a_skip(
    trained: Any, keep: MakeCompactor
) -> None:
    compactor = keep(trained.store, skips=[2])
    compactor.run_round()
    first = trained.of[VersionId(1, 0)]
    trained.publish(1, density=0.05)
    compactor.run_round()
    trained.publish(2, density=0.0)
    compactor.run_round()
    skip = weights.read_skip(trained.store, VersionId(1, 0), VersionId(1, 2))
    different = sum(int((first[n] != w).sum()) for n, w in trained.words.items())
    assert skip.stats.changed == different


def test_a_skip_that_changes_nothing_is_not_written(trained: Any, keep: MakeCompactor) -> None:
    compactor = keep(trained.store, skips=[2])
    compactor.run_round()
    for number in (1, 2):
        trained.publish(number, density=0.0)
        compactor.run_round()
    assert skips(trained.store) == []


def test_a_roll_back_breaks_the_skips_that_reach_over_it(
    trained: Any, keep: MakeCompactor, tmp_path: Path
) -> None:
    compactor = keep(trained.store, skips=[4])
    compactor.run_round()
    for number in (1, 2):
        trained.publish(number)
        compactor.run_round()
    trained.open(VersionId(1, 1), "rollback")
    trained.back_to(VersionId(1, 1))
    with pytest.raises(FencedError):
        compactor.run_round()
    successor = keep(trained.store, epoch=2, skips=[4])
    for number in range(3, 9):
        trained.publish(number, epoch=2)
        assert successor.run_round().failures == ()
    assert skips(trained.store) == [(4, 8)]
    reader = Mirror(trained.store, tmp_path / "reader")
    reader.move_to(VersionId(2, 8))
    assert trained.is_in(reader)


def test_a_version_without_a_base_needs_no_keyframe_and_breaks_no_rule(
    trained: Any, keep: MakeCompactor
) -> None:
    compactor = keep(trained.store, every=2, skips=[2])
    for number in range(1, 6):
        trained.publish(number, complete=True)
        assert compactor.run_round().failures == ()
    assert keyframes(trained.store) == []
    assert skips(trained.store) == []


@pytest.mark.parametrize("count", [1, 3])
def test_the_newest_keyframes_are_kept_as_many_as_the_run_has_it(
    trained: Any, keep: MakeCompactor, count: int
) -> None:
    compactor = keep(trained.store, every=2, retainVersions=100, retainKeyframes=count)
    for number in range(1, 11):
        trained.publish(number)
        assert compactor.run_round().failures == ()
    kept = [VersionId(1, number) for number in (2, 4, 6, 8, 10)][-count:]
    assert keyframes(trained.store) == kept


def test_versions_that_are_all_complete_are_collected_and_not_copied(
    trained: Any, keep: MakeCompactor
) -> None:
    compactor = keep(trained.store, encoding="Full", retainVersions=2)
    for number in range(1, 7):
        trained.publish(number, complete=True)
        assert compactor.run_round().failures == ()
    assert sorted(take_listing(trained.store).payloads) == [VersionId(1, 5), VersionId(1, 6)]
    assert not (compactor._config.folder / "copy").exists()


def test_a_reader_far_behind_needs_few_objects(
    trained: Any, keep: MakeCompactor, tmp_path: Path
) -> None:
    compactor = keep(trained.store, every=80, skips=[4, 16], collect_every_s=1e9)
    near, far = Mirror(trained.store, tmp_path / "near"), Mirror(trained.store, tmp_path / "far")
    for number in range(1, 201):
        trained.publish(number, density=0.0002)
        if number == 150:
            near.move_to(VersionId(1, 150))
        if number % 10 == 0:
            assert compactor.run_round().failures == ()
    assert keyframes(trained.store) == [VersionId(1, 80), VersionId(1, 160)]
    # Up by deltas and ever larger strides, then down again: at most three of each size.
    for reader in (near, far):
        edges = reader.move_to(VersionId(1, 200))
        assert sum(len(edge.objects) for edge in edges) <= 12
        assert trained.is_in(reader)
