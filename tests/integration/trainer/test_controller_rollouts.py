"""A rollout worker against partners that fail: retried, masked, never scored zero."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.native_template import TEMPLATE, write_call

from etude.agent.chat import ChatFormat
from etude.agent.summaries import TOOL_NAME
from etude.agent.tool_calls import render_call
from etude.common.api.run.rollout_policy import RolloutPolicy
from etude.common.api.storage import Storage
from etude.trainer.rollouts.protocol import GroupRequest, WorkerConfig
from etude.trainer.rollouts.worker import RolloutWorker
from etude.trainer.routing.table import EngineState, RoutingTable
from etude.v1 import rollout_pb2
from etude.v1.journal_pb2 import JournalRollout

NOBODY = "127.0.0.1:1"
"""Nothing listens there."""


@pytest.fixture
def task_uri(tmp_path: Path) -> str:
    folder = tmp_path / "tasks" / "fix-add"
    folder.mkdir(parents=True)
    (folder / "instruction.md").write_text("Fix add.\n")
    (folder / "task.toml").write_text("")
    return folder.as_uri()


def make_worker(partners: Any, model_folder: Path, tmp_path: Path) -> RolloutWorker:
    return RolloutWorker(
        WorkerConfig(
            run="run",
            model_folder=model_folder,
            brokers={"repos": partners.target},
            templates={"repos": "python"},
            rewards_target=partners.target,
            score_timeout_s=30,
            storage=Storage(uri=f"file://{tmp_path}/run"),
            outage_s=5,
            traces_file=tmp_path / "traces.jsonl",
        )
    )


@pytest.fixture
async def worker(partners: Any, model_folder: Path, tmp_path: Path) -> AsyncIterator[RolloutWorker]:
    made = make_worker(partners, model_folder, tmp_path)
    yield made
    await made.close()


def order(task_uri: str, *targets: str, count: int = 3, **limits: Any) -> GroupRequest:
    policy = {"toolset": "Compact", "max_tokens": 600, "timeout_seconds": 20, "retries": 1}
    return GroupRequest(
        group_id="rl-000007",
        task_id="train/fix-add",
        task_uri=task_uri,
        environment="repos",
        indices=tuple(range(count)),
        seed=11,
        temperature=1.0,
        routing=RoutingTable(
            revision=1, engines=tuple((target, EngineState.LIVE) for target in targets)
        ),
        limits=RolloutPolicy(**{**policy, **limits}),
        trace=(("traceparent", f"00-{'7' * 32}-{'1' * 16}-01"),),
    )


async def run(worker: RolloutWorker, given: GroupRequest) -> list[JournalRollout]:
    result = await worker.run_group(given)
    return [JournalRollout.FromString(data) for data in result.records]


async def test_a_group_comes_back_scored_with_its_exact_tokens(
    worker: RolloutWorker, partners: Any, task_uri: str, model_folder: Path
) -> None:
    records = await run(worker, order(task_uri, partners.target))
    chat = ChatFormat.load(model_folder)
    assert [r.rollout.rollout_id for r in records] == [f"rl-000007-{i}" for i in range(3)]
    assert [r.reward.reward for r in records] == [1.0] * 3
    rollout = records[0].rollout
    text = chat.decode(rollout.links[0].token_ids)
    assert "<|user|>Fix add.<|end|><|assistant|>" in text
    assert "<tool_response>x = 1</tool_response>" in text
    assert text.endswith("Done.<|end|>")
    sampled = sum(rollout.links[0].loss_mask)
    assert sampled == rollout.costs.completion_tokens
    assert rollout.oldest.number == rollout.newest.number == 3
    assert rollout.ending == rollout_pb2.ENDING_STOPPED
    assert rollout.trace_id == "7" * 32
    assert rollout.seed != records[1].rollout.seed


async def test_contexts_that_the_policy_sums_up_are_links_of_one_rollout(
    worker: RolloutWorker, partners: Any, task_uri: str, model_folder: Path
) -> None:
    read_and_sum_up = render_call("read_file", {"path": "a.py"}) + render_call(TOOL_NAME, {})
    # The engine counts a context's turns: each one reads, and is summed up.
    partners.engine.turns = (read_and_sum_up, "x is 1.")
    limits: Any = {"max_turns": 3, "max_turn_tokens": 200, "max_tokens": 20_000}
    summaries = {"contextTokens": 2_048, "maxTokens": 64}
    given = order(task_uri, partners.target, count=1, summaries=summaries, **limits)
    [record] = await run(worker, given)
    chat, rollout = ChatFormat.load(model_folder), record.rollout
    texts = [chat.decode(link.token_ids) for link in rollout.links]
    assert (record.reward.reward, rollout.ending) == (1.0, rollout_pb2.ENDING_TURN_LIMIT)
    assert [text.count("<summary>\nx is 1.\n</summary>") for text in texts] == [0, 1, 1]
    assert [text.endswith("<|assistant|>x is 1.<|end|>") for text in texts] == [True, True, False]
    assert sum(sum(e.loss_mask) for e in rollout.links) == rollout.costs.completion_tokens
    assert rollout.costs.summary_tokens == 2 * len(chat.completion("x is 1."))


async def test_a_group_calls_tools_in_the_models_own_form(
    partners: Any, model_folder: Path, task_uri: str, tmp_path: Path
) -> None:
    (model_folder / "chat_template.jinja").write_text(TEMPLATE)
    partners.engine.chat = chat = ChatFormat.load(model_folder)
    call = write_call("read_file", path="a.py")
    partners.engine.turns = (call, "Done.")
    worker = make_worker(partners, model_folder, tmp_path)
    given = order(task_uri, partners.target, tool_format="Native", max_tokens=8_000)
    records = await run(worker, given)
    await worker.close()
    assert [record.reward.reward for record in records] == [1.0] * 3
    rollout = records[0].rollout
    text = chat.decode(rollout.links[0].token_ids)
    assert text.startswith('<|system|>{"type": "function", "function": {"name": "read_file"')
    assert "<|system|>Fix the bug.<|end|><|user|>Fix add.<|end|><|assistant|>" in text
    result = "<|tool|>read_file: <tool_response>x = 1</tool_response><|end|>"
    assert text.endswith(f"{call}<|end|>{result}<|assistant|>Done.<|end|>")
    assert (rollout.costs.tool_calls, rollout.costs.malformed_calls) == (1, 0)
    assert sum(rollout.links[0].loss_mask) == rollout.costs.completion_tokens


async def test_scoring_gets_diffs_and_calls_and_no_tokens(
    worker: RolloutWorker, partners: Any, task_uri: str
) -> None:
    await run(worker, order(task_uri, partners.target))
    [request] = partners.rewards.requests
    assert (request.task_uri, request.pool) == (task_uri, "repos")
    assert all(r.diff == b"the diff" and r.calls and not r.links for r in request.rollouts)


async def test_what_is_graded_in_a_fork_is_saved_as_it_ends_with_its_processes(
    worker: RolloutWorker, partners: Any, task_uri: str
) -> None:
    settings = Path(task_uri.removeprefix("file://")) / "task.toml"
    await run(worker, order(task_uri, partners.target))
    assert not partners.states.saved

    settings.write_text('[metadata]\netude_image = "shop"\netude_grade = "fork"\n')
    records = await run(worker, order(task_uri, partners.target))
    saved = partners.states.saved
    assert all(request.with_memory for request in saved)
    handed = [r.snapshot_id for r in partners.rewards.requests[-1].rollouts]
    assert sorted(handed) == sorted(request.snapshot_id for request in saved)
    assert len({*handed}) == 3
    assert not any(record.rollout.snapshot_id for record in records)

    partners.states.can_save = False
    records = await run(worker, order(task_uri, partners.target, retries=0))
    assert all(r.rollout.ending == rollout_pb2.ENDING_PLATFORM_FAULT for r in records)
    assert all("no cap 'memory'" in r.rollout.fault for r in records)


async def test_the_journal_gets_no_diff(
    worker: RolloutWorker, partners: Any, task_uri: str
) -> None:
    records = await run(worker, order(task_uri, partners.target))
    assert not any(record.rollout.diff for record in records)


@pytest.mark.parametrize("too_large", ["", "the change has more than 10 files"])
async def test_changes_too_large_to_be_scored_end_a_rollout_as_its_own_fault(
    worker: RolloutWorker, partners: Any, task_uri: str, too_large: str
) -> None:
    partners.node.diff, partners.node.too_large = [bytes(1 << 20)] * 5, too_large
    records = await run(worker, order(task_uri, partners.target, count=1))
    assert records[0].reward.WhichOneof("result") == "reward"
    [request] = partners.rewards.requests
    [rollout] = request.rollouts
    assert rollout.ending == rollout_pb2.ENDING_CHANGE_TOO_LARGE
    assert (rollout.diff, rollout.fault[: len(too_large)]) == (b"", too_large)
    assert "more than" in rollout.fault


async def test_the_largest_changes_that_can_be_scored_are(
    worker: RolloutWorker, partners: Any, task_uri: str
) -> None:
    partners.node.diff = [bytes(1 << 20)] * 3
    records = await run(worker, order(task_uri, partners.target, count=2))
    assert [r.reward.WhichOneof("result") for r in records] == ["reward"] * 2


async def test_the_group_is_leased_together_and_every_lease_is_released(
    worker: RolloutWorker, partners: Any, task_uri: str
) -> None:
    await run(worker, order(task_uri, partners.target))
    [launch] = partners.broker.launches
    assert (launch.count, launch.ttl_seconds) == (3, 0)
    assert launch.workspace.uri == f"{task_uri}/environment"
    await worker.close()
    held = {lease.lease_id for leases in partners.broker.granted.values() for lease in leases}
    assert set(partners.broker.released) == held


async def test_environments_are_asked_for_in_the_image_that_the_task_names(
    worker: RolloutWorker, partners: Any, task_uri: str, tmp_path: Path
) -> None:
    (tmp_path / "tasks/fix-add/task.toml").write_text('[metadata]\netude_image = "django-4"\n')
    await run(worker, order(task_uri, partners.target))
    assert [launch.image for launch in partners.broker.launches] == ["django-4"]


async def test_an_environment_is_never_used_by_two_attempts(
    worker: RolloutWorker, partners: Any, task_uri: str
) -> None:
    given = order(task_uri, partners.target, count=1)
    await run(worker, given)
    successor = RolloutWorker(worker.config)
    partners.node.losses = 1
    await run(successor, given)
    await successor.close()
    assert len(partners.broker.granted) == len(partners.broker.launches) == 3


async def test_no_more_rollouts_run_than_there_are_slots(
    worker: RolloutWorker, partners: Any, task_uri: str
) -> None:
    partners.engine.delay_s = 0.05
    records = await run(worker, order(task_uri, partners.target, count=10, max_concurrent=4))
    assert len(records) == 10
    assert partners.engine.most <= 4


async def test_a_rollout_goes_on_in_another_environment_when_its_own_is_lost(
    worker: RolloutWorker, partners: Any, task_uri: str
) -> None:
    partners.node.losses = 2
    result = await worker.run_group(order(task_uri, partners.target))
    records = [JournalRollout.FromString(data) for data in result.records]
    assert (result.retried, result.lost, result.recovered) == (0, 2, 2)
    assert [r.reward.reward for r in records] == [1.0] * 3
    again = [launch for launch in partners.broker.launches if launch.count == 1]
    assert [launch.queue_timeout_seconds for launch in again] == [20, 20]
    await worker.close()
    held = {lease.lease_id for leases in partners.broker.granted.values() for lease in leases}
    assert set(partners.broker.released) == held


async def test_a_rollout_that_is_lost_again_is_masked_and_not_scored(
    worker: RolloutWorker, partners: Any, task_uri: str
) -> None:
    partners.node.losses = 1_000
    records = await run(worker, order(task_uri, partners.target))
    assert {r.rollout.ending for r in records} == {rollout_pb2.ENDING_PLATFORM_FAULT}
    assert {r.reward.WhichOneof("result") for r in records} == {"fault"}
    assert partners.rewards.requests == []


async def test_a_turn_waits_for_a_node_that_restarts(
    worker: RolloutWorker, partners: Any, task_uri: str
) -> None:
    partners.node.refusals = 2
    result = await worker.run_group(order(task_uri, partners.target))
    assert result.retried == 0
    assert JournalRollout.FromString(result.records[0]).reward.reward == 1.0


async def test_a_dead_engine_is_left_for_another_one(
    worker: RolloutWorker, partners: Any, task_uri: str
) -> None:
    records = await run(worker, order(task_uri, NOBODY, partners.target))
    assert [r.reward.reward for r in records] == [1.0] * 3


async def test_a_single_engine_that_restarts_is_waited_for(
    worker: RolloutWorker, partners: Any, task_uri: str
) -> None:
    partners.engine.refusals = 4
    result = await worker.run_group(order(task_uri, partners.target))
    assert result.retried == 0


async def test_an_aborted_completion_is_sampled_again_after_a_pause(
    worker: RolloutWorker, partners: Any, task_uri: str
) -> None:
    partners.engine.aborts = 2
    result = await worker.run_group(order(task_uri, partners.target, count=1))
    assert result.retried == 0
    assert JournalRollout.FromString(result.records[0]).reward.reward == 1.0


async def test_an_engine_that_goes_on_aborting_costs_the_policy_nothing(
    worker: RolloutWorker, partners: Any, task_uri: str
) -> None:
    partners.engine.aborts = 1_000
    records = await run(
        worker, order(task_uri, partners.target, count=1, retries=0, timeout_seconds=2)
    )
    assert records[0].rollout.ending == rollout_pb2.ENDING_PLATFORM_FAULT
    assert len(partners.engine.requests) <= 12  # outage_s 5, half a second between two


async def test_an_engine_that_stays_away_masks_the_rollout(
    worker: RolloutWorker, partners: Any, task_uri: str
) -> None:
    records = await run(worker, order(task_uri, NOBODY, count=1, retries=0, timeout_seconds=60))
    assert records[0].rollout.ending == rollout_pb2.ENDING_PLATFORM_FAULT
    assert "engine" in records[0].rollout.fault


async def test_time_lost_to_an_outage_is_not_the_policys_time(
    worker: RolloutWorker, partners: Any, task_uri: str
) -> None:
    partners.engine.refusals = 1_000
    records = await run(
        worker, order(task_uri, partners.target, count=1, retries=0, timeout_seconds=1)
    )
    assert records[0].rollout.ending == rollout_pb2.ENDING_PLATFORM_FAULT


async def test_a_policy_that_is_too_slow_is_scored(
    worker: RolloutWorker, partners: Any, task_uri: str
) -> None:
    partners.engine.delay_s = 0.7
    records = await run(worker, order(task_uri, partners.target, count=1, timeout_seconds=1))
    assert records[0].rollout.ending == rollout_pb2.ENDING_TIME_LIMIT
    assert records[0].reward.reward == 1.0


async def test_a_broken_launch_stream_gives_the_same_leases_again(
    worker: RolloutWorker, partners: Any, task_uri: str
) -> None:
    partners.broker.breaks = 1
    records = await run(worker, order(task_uri, partners.target))
    assert len(records) == 3
    assert len(partners.broker.granted) == 1
    assert len(partners.broker.launches) == 2


async def test_what_cannot_be_scored_is_tried_again_and_then_masked(
    worker: RolloutWorker, partners: Any, task_uri: str
) -> None:
    partners.rewards.faults = 4
    records = await run(worker, order(task_uri, partners.target))
    results = sorted(r.reward.WhichOneof("result") for r in records)
    assert results == ["fault", "reward", "reward"]
    assert [len(request.rollouts) for request in partners.rewards.requests] == [3, 3]


@pytest.mark.parametrize(
    ("text", "reason"), [(b"word " * 500, "PromptTooLong"), (b"\xff", "not UTF-8"), (None, "")]
)
async def test_a_task_that_cannot_be_run_is_masked_without_an_environment(
    worker: RolloutWorker, partners: Any, task_uri: str, text: bytes | None, reason: str
) -> None:
    instruction = Path(task_uri.removeprefix("file://")) / "instruction.md"
    instruction.unlink() if text is None else instruction.write_bytes(text)
    result = await worker.run_group(order(task_uri, partners.target))
    records = [JournalRollout.FromString(data) for data in result.records]
    assert [r.rollout.rollout_id for r in records] == [f"rl-000007-{i}" for i in range(3)]
    assert {r.reward.WhichOneof("result") for r in records} == {"fault"}
    assert all(task_uri in r.rollout.fault and reason in r.rollout.fault for r in records)
    assert (result.retried, partners.broker.launches) == (0, [])


async def test_only_the_missing_siblings_of_a_group_are_run(
    worker: RolloutWorker, partners: Any, task_uri: str
) -> None:
    given = order(task_uri, partners.target)
    full = await run(worker, given)
    part = await run(worker, GroupRequest(**{**_fields(given), "indices": (2,)}))
    assert [r.rollout.index for r in part] == [2]
    assert part[0].rollout.seed == full[2].rollout.seed


def _fields(given: GroupRequest) -> dict[str, Any]:
    return {name: getattr(given, name) for name in given.__dataclass_fields__}
