"""Rows of metrics and rollouts."""

import dataclasses
import json
from pathlib import Path

import pytest
from tests.support.chat_tokens import encode_opening, encode_results
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from etude.agent.chat import CHAT_TEMPLATE, LAYOUT_TOKENS, ChatFormat
from etude.trainer.controller.reporting.rows import (
    RowPosition,
    StepFaults,
    evaluation_fields,
    policy_fields,
    step_row,
)
from etude.trainer.learner.batches import StepResult
from etude.trainer.rollouts.contents.readable_rows import rollout_rows
from etude.v1.journal_pb2 import JournalRollout
from etude.v1.rewards_pb2 import RewardFault, RewardRecord
from etude.v1.rollout_pb2 import ENDING_STOPPED, CallRecord, Costs, Link, Rollout

PLACE = RowPosition(time_s=1.0, phase="rl", step=3, global_step=103)
RESULT = StepResult(
    loss=0.5,
    grad_norm=0.1,
    tokens=1000,
    trained_tokens=400,
    learning_rate=1e-4,
    mismatch_mean=1e-6,
    weight_digest="d",
    seconds=0.5,
)


@pytest.fixture
def chat(tmp_path: Path) -> ChatFormat:
    alphabet = {byte: i for i, byte in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in LAYOUT_TOKENS])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return ChatFormat.load(tmp_path)


def record(name: str, reward: float, *, group: str = "g", success: float = 0.0) -> JournalRollout:
    return JournalRollout(
        rollout=Rollout(
            rollout_id=name,
            group_id=group,
            links=[Link(token_ids=[1, 2, 3])],
            costs=Costs(turns=2, malformed_calls=1, completion_tokens=2),
            ending=ENDING_STOPPED,
            calls=[
                CallRecord(turn=0, name="read_file"),
                CallRecord(turn=1, name="zzz", is_malformed=True),
            ],
        ),
        reward=RewardRecord(rollout_id=name, reward=reward, success=success),
    )


def test_a_step_row_has_speed_and_place() -> None:
    row = step_row(PLACE, RESULT, seconds=2.0)
    assert (row["kind"], row["phase"], row["step"], row["global_step"]) == ("step", "rl", 3, 103)
    assert row["tokens_per_second"] == 500
    json.dumps(row, allow_nan=False)


def test_a_step_row_has_what_the_head_of_multi_token_prediction_learns() -> None:
    result = dataclasses.replace(RESULT, extra={"mtp_agreement": 0.75, "removed_tokens": 2})
    row = step_row(PLACE, result, seconds=2.0)
    assert row["mtp_agreement"] == 0.75
    assert "removed_tokens" not in row


def test_a_policy_row_counts_tools_endings_and_groups_with_a_gradient() -> None:
    records = [record("a", 1.0), record("b", 0.0), record("c", 1.0, group="h")]
    row = policy_fields(RESULT, records, staleness=[0, 1, 1], faults=StepFaults(2, 1, 0))
    assert row["reward_mean"] == pytest.approx(2 / 3)
    assert row["tools"] == {"read_file": 3}
    assert row["endings"] == {"stopped": 3}
    assert row["groups_active"] == 1
    assert (row["staleness_p50"], row["staleness_max"]) == (1, 1)
    assert (row["rollouts"], row["masked"], row["retried"]) == (5, 2, 1)
    assert row["malformed_per_rollout"] == 1
    json.dumps(row, allow_nan=False)


def test_a_step_whose_rollouts_were_all_masked_has_a_row_too() -> None:
    row = policy_fields(RESULT, [], staleness=[], faults=StepFaults(4, 0, 0))
    assert (row["rollouts"], row["reward_mean"], row["staleness_max"]) == (4, 0.0, 0)


def test_an_evaluation_shows_both_modes() -> None:
    sampled = [record("a", 1.0, success=1.0), record("b", 0.0)]
    fields = evaluation_fields("held-out", sampled=sampled, greedy=[record("c", 1.0, success=1.0)])
    assert (fields["success"], fields["greedy_success"], fields["count"]) == (0.5, 1.0, 2)
    assert set(fields["behaviour"]) == {"sampled", "greedy"}
    assert "greedy_success" not in evaluation_fields("held-out", sampled=sampled, greedy=[])


def test_tasks_with_more_samples_weigh_no_more_and_have_a_best_of_several() -> None:
    successes = {"a": [1.0, 0.0, 0.0, 0.0], "b": [1.0, 1.0]}
    records = []
    for task, values in successes.items():
        for place, success in enumerate(values):
            records.append(record(f"{task}-{place}", success, success=success))
            records[-1].rollout.task_id = task
    fields = evaluation_fields("held-out", sampled=records, greedy=[])
    assert fields["success"] == pytest.approx((0.25 + 1) / 2)
    assert fields["best_of"] == {"2": pytest.approx((0.5 + 1) / 2)}
    assert "best_of" not in evaluation_fields("held-out", sampled=records[:1], greedy=[])


def transcript(chat: ChatFormat) -> Link:
    """One call and its result, as the turn loop leaves them."""
    pieces = [
        (encode_opening(chat, "Be good.", "Fix it."), False),
        (chat.completion("calls a tool"), True),
        (encode_results(chat, ["first", "<|end|> as text"]), False),
        (chat.completion("Done."), True),
    ]
    ids = [token for tokens, _ in pieces for token in tokens]
    mask = b"".join(bytes([sampled]) * len(tokens) for tokens, sampled in pieces)
    return Link(token_ids=ids, loss_mask=mask, sampler_logprobs=[0.0] * len(ids))


def test_a_rollout_reads_turn_by_turn(chat: ChatFormat) -> None:
    rollout = Rollout(rollout_id="r", links=[transcript(chat)], ending=ENDING_STOPPED)
    record = JournalRollout(rollout=rollout, reward=RewardRecord(reward=1.0))
    (row,) = rollout_rows([record], chat)
    assert [turn["role"] for turn in row["turns"]][:4] == ["system", "user", "assistant", "tool"]
    assert row["turns"][0]["text"] == "Be good."
    assert row["turns"][1]["text"] == "Fix it."
    assert row["turns"][2]["text"] == "calls a tool"
    assert row["turns"][-1] == {"role": "assistant", "text": "Done."}
    assert [t["text"] for t in row["turns"][3:5]] == ["first", "<|end|> as text"]


def test_a_rollout_has_its_costs_and_its_edits_without_evidence() -> None:
    rollout = Rollout(
        rollout_id="r",
        costs=Costs(
            prompt_tokens=10,
            tool_output_tokens=5,
            completion_tokens=7,
            tool_seconds=0.25,
            token_seconds=1.5,
        ),
        calls=[
            CallRecord(turn=0, name="read_file", arguments_json='{"path": "a.py"}'),
            CallRecord(turn=1, name="search_replace", arguments_json='{"path": "a.py"}'),
            CallRecord(turn=1, name="search_replace", arguments_json='{"path": "b.py"}'),
        ],
    )
    scored = JournalRollout(rollout=rollout, reward=RewardRecord(reward=1.0))
    (row,) = rollout_rows([scored], None)
    assert (row["read_tokens"], row["sampled_tokens"], row["seconds"]) == (15, 7, 1.75)
    assert row["edits_without_evidence"] == 1


def test_a_masked_rollout_says_why(chat: ChatFormat) -> None:
    fault = RewardRecord(fault=RewardFault(reason="INFRA", message="no slot"))
    record = JournalRollout(rollout=Rollout(rollout_id="r", ending=ENDING_STOPPED), reward=fault)
    (row,) = rollout_rows([record], chat)
    assert row["fault"] == "INFRA: no slot"
    assert "reward" not in row
