"""The bench that kills processes finds histories that differ from one without kills."""

import itertools
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))

from chaos_bench.counts import Counts
from chaos_bench.history import RunHistory, read_history
from chaos_bench.kill_points import POINTS, draw_points
from chaos_bench.real_stack import RunWatch, count_diverged
from controller_bench.run import RunShape, take_over, train_to_end
from tests.support.trainer_simulation.workers import SimulatedRollouts

from etude.common.durable_log import encode_frame, encode_segment
from etude.common.weights import VersionId
from etude.trainer.controller.journal.audit import read_frames
from etude.trainer.controller.run import Run
from etude.v1 import journal_pb2

SHAPE = RunShape(
    prompts_per_step=2, group_size=3, staleness=0, steps=4, seed=5, steps_per_checkpoint=1
)


@pytest.fixture
async def history(tmp_path: Path) -> RunHistory:
    """History of a run without kills."""
    runs: list[Run] = []
    workers = SimulatedRollouts(lambda: runs[0].publishing.served or VersionId(0, 0))
    opened = take_over(SHAPE, tmp_path, workers)
    runs.append(opened.run)
    await train_to_end(opened.run, SHAPE, opened.checkpoint)
    return read_history(tmp_path / "run")


def rewrite(history: RunHistory, folder: Path, kind: str) -> RunHistory:
    """The history with its last record of a kind changed."""
    records = [
        journal_pb2.JournalRecord.FromString(payload)
        for key in sorted(history.objects)
        for _, payload in read_frames(history.objects[key])
    ]
    chosen = [each for each in records if each.WhichOneof("body") == kind][-1]
    if kind == "step":
        chosen.step.weight_digest = "another"
    elif kind == "batch":
        chosen.batch.group_ids.reverse()
    else:
        records.remove(chosen)
    frames = []
    for number, record in enumerate(records, start=1):
        record.sequence = number
        field = record.DESCRIPTOR.fields_by_name[record.WhichOneof("body") or ""].number
        frames.append(encode_frame(field, number, record.SerializeToString()))
    path = folder / "journal" / "000001" / "000000000001.wal"
    path.parent.mkdir(parents=True)
    path.write_bytes(encode_segment("bench", 1, first=1, frames=frames))
    return read_history(folder)


async def test_a_history_without_kills_is_its_own_reference(history: RunHistory) -> None:
    assert history.newest_step == 4
    assert len(history.rollouts) == 24
    assert history.compare(history, acknowledged=history.rollouts) == (0, 0, 0)


@pytest.mark.parametrize("kind", ["step", "batch"])
async def test_another_result_or_batch_is_found(
    history: RunHistory, tmp_path: Path, kind: str
) -> None:
    changed = rewrite(history, tmp_path / "changed", kind)
    assert changed.compare(history, acknowledged=()).diverged == 1


async def test_a_rollout_that_is_gone_is_found(history: RunHistory, tmp_path: Path) -> None:
    changed = rewrite(history, tmp_path / "changed", "rollout")
    assert changed.compare(history, acknowledged=history.rollouts).lost >= 1


async def test_a_step_that_is_trained_again_must_have_the_same_result(history: RunHistory) -> None:
    number, step = history.steps[1]
    history.steps.append((number, step))
    assert count_diverged(history, steps=4) == 0
    history.steps.append((number, step._replace(grad_norm=2.0)))
    assert count_diverged(history, steps=4) == 1
    assert count_diverged(history, steps=6) == 3


async def test_steps_lost_are_those_behind_the_newest_checkpoint_of_dead_controllers(
    history: RunHistory, tmp_path: Path
) -> None:
    counts = Counts()
    folder = tmp_path / "run"
    saved = sorted((folder / "checkpoints").glob("*"))
    assert len(saved) == 4
    with RunWatch(folder, counts).watching():
        (folder / "journal" / "000002").mkdir()
    assert counts.max_steps_lost == 0
    shutil.rmtree(saved[-1])
    with RunWatch(folder, counts).watching():
        (folder / "journal" / "000003").mkdir()
    assert counts.max_steps_lost == 1


def test_each_round_of_kills_has_each_point_and_an_interrupted_one_goes_on() -> None:
    whole = list(itertools.islice(draw_points(0, done=0), 2 * len(POINTS)))
    assert sorted(whole[: len(POINTS)], key=str) == sorted(POINTS, key=str)
    assert whole[: len(POINTS)] != whole[len(POINTS) :]
    rest = list(itertools.islice(draw_points(0, done=7), len(whole) - 7))
    assert rest == whole[7:]


def test_counts_of_an_interrupted_call_are_read_again(tmp_path: Path) -> None:
    counts = Counts()
    counts.add_kill("engine, mid-turn")
    counts.add_steps_lost(1)
    counts.add_end(lost=0, duplicated=1, diverged=0)
    counts.save(tmp_path / "counts.json")
    assert Counts.load(tmp_path / "counts.json") == counts
    assert not counts.is_sound
    assert counts.merge(Counts()) == counts
