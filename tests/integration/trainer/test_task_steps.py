"""Rollouts of tasks of several steps: one conversation, a change for each step, honest ends."""

from pathlib import Path
from typing import Any

import pytest

from etude.common.api.run.rollout_policy import RolloutPolicy
from etude.trainer.rollouts.protocol import GroupRequest, GroupResult
from etude.trainer.rollouts.worker import RolloutWorker
from etude.trainer.routing.table import EngineState, RoutingTable
from etude.v1 import rollout_pb2
from etude.v1.journal_pb2 import JournalRollout

SETTINGS = "[[steps]]\nname = 'bake'\n[[steps]]\nname = 'ice'\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "tasks" / "cake"
    for path, text in {
        "task.toml": SETTINGS,
        "instruction.md": "All of it.\n",
        "steps/bake/instruction.md": "Bake a cake.\n",
        "steps/ice/instruction.md": "Ice it.\n",
    }.items():
        (made / path).parent.mkdir(parents=True, exist_ok=True)
        (made / path).write_text(text)
    return made


def bring(folder: Path, step: str) -> None:
    """Let a step bring a file and a script."""
    place = folder / "steps" / step / "workdir"
    place.mkdir()
    (place / "setup.sh").write_text("echo sugar > sugar.txt\n")


def order(folder: Path, partners: Any, *, turns: int = 8) -> GroupRequest:
    limits = RolloutPolicy(
        toolset="Compact", max_tokens=600, timeout_seconds=20, retries=0, max_turns=turns
    )
    return GroupRequest(
        group_id="rl-7",
        task_id="train/cake",
        task_uri=folder.as_uri(),
        environment="repos",
        indices=(0,),
        seed=11,
        temperature=1.0,
        routing=RoutingTable(revision=1, engines=((partners.target, EngineState.LIVE),)),
        limits=limits,
    )


def rollout(result: GroupResult) -> rollout_pb2.Rollout:
    return JournalRollout.FromString(result.records[0]).rollout


def steps_of(given: rollout_pb2.Rollout) -> list[tuple[str, bytes]]:
    return [(step.name, step.diff) for step in given.steps]


async def test_the_next_request_follows_in_the_same_conversation(
    worker: RolloutWorker, partners: Any, folder: Path
) -> None:
    found = rollout(await worker.run_group(order(folder, partners)))

    assert found.ending == rollout_pb2.ENDING_STOPPED, found.fault
    (link,) = found.links
    text = partners.engine.chat.decode(list(link.token_ids))
    assert "Bake a cake." in text
    assert "Done.<|end|><|user|>Ice it.<|end|><|assistant|>Done.<|end|>" in text
    assert "All of it." not in text
    sampled = [t for t, is_own in zip(link.token_ids, link.loss_mask, strict=True) if is_own]
    assert "Ice it." not in partners.engine.chat.decode(sampled)


async def test_each_step_is_scored_by_its_change_and_recorded_without_it(
    worker: RolloutWorker, partners: Any, folder: Path
) -> None:
    found = rollout(await worker.run_group(order(folder, partners)))

    (scored,) = partners.rewards.requests[0].rollouts
    assert steps_of(scored) == [("bake", b"the diff"), ("ice", b"")]
    assert scored.diff == b"the diff"
    assert steps_of(found) == [("bake", b""), ("ice", b"")]


async def test_a_limit_keeps_later_steps_from_beginning(
    worker: RolloutWorker, partners: Any, folder: Path
) -> None:
    found = rollout(await worker.run_group(order(folder, partners, turns=2)))

    assert found.ending == rollout_pb2.ENDING_TURN_LIMIT
    assert steps_of(found) == [("bake", b"")]


async def test_what_a_step_brings_enters_between_the_calls_of_the_policy(
    worker: RolloutWorker, partners: Any, folder: Path
) -> None:
    bring(folder, "ice")
    partners.node.answer = b"ready"

    found = rollout(await worker.run_group(order(folder, partners)))

    assert [step.name for step in found.steps] == ["bake", "ice"]
    assert [call for _, call in partners.node.ran] == ["0.0", "ice/0", "ice/1", "ice/2"]


async def test_a_replacement_of_a_lost_environment_gets_what_steps_brought(
    worker: RolloutWorker, partners: Any, folder: Path
) -> None:
    bring(folder, "bake")
    partners.node.answer = b"ready"
    partners.node.losses_after = 3

    result = await worker.run_group(order(folder, partners))

    assert (result.lost, result.recovered) == (1, 1)
    assert [call for _, call in partners.node.ran] == [
        *["bake/0", "bake/1", "bake/2"] * 2,
        "0.0",
    ]


async def test_a_later_step_that_cannot_begin_ends_the_rollout_which_is_scored(
    worker: RolloutWorker, partners: Any, folder: Path
) -> None:
    bring(folder, "ice")

    found = rollout(await worker.run_group(order(folder, partners)))

    assert found.ending == rollout_pb2.ENDING_STOPPED
    assert [step.name for step in found.steps] == ["bake"]


async def test_a_first_step_that_cannot_begin_masks_the_rollout(
    worker: RolloutWorker, partners: Any, folder: Path
) -> None:
    bring(folder, "bake")

    found = rollout(await worker.run_group(order(folder, partners)))

    assert found.ending == rollout_pb2.ENDING_PLATFORM_FAULT
    assert "step bake of the task: x = 1" in found.fault


async def test_a_change_too_large_is_no_step_to_be_graded(
    worker: RolloutWorker, partners: Any, folder: Path
) -> None:
    partners.node.too_large = "more than 1 MiB"

    found = rollout(await worker.run_group(order(folder, partners)))

    assert found.ending == rollout_pb2.ENDING_CHANGE_TOO_LARGE
    assert steps_of(found) == []


async def test_a_step_that_brings_too_much_masks_its_rollouts(
    worker: RolloutWorker, partners: Any, folder: Path
) -> None:
    bring(folder, "ice")
    (folder / "steps/ice/workdir/large").write_bytes(bytes(5 << 20))

    found = rollout(await worker.run_group(order(folder, partners)))

    assert found.ending == rollout_pb2.ENDING_PLATFORM_FAULT
    assert "steps/ice/workdir/large exceeds" in found.fault
