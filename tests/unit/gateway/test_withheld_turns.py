"""Turns in which redaction finds something are recorded without their tokens."""

import asyncio
from array import array
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import assume, given, settings
from prometheus_client import REGISTRY
from tests.support.feedback.planted_secrets import FORMATS, is_left, plant
from tests.support.gateway.served import ServedGateway
from tests.unit.gateway.test_session_trees import ask, policy, text_of, user

from etude.agent.chat import ChatFormat
from etude.agent.completions import Completion, FinishReason
from etude.agent.trajectory import PolicySpan
from etude.common.api_keys import KeyOwner
from etude.common.blobs import MemoryStore
from etude.common.redact.redactor import find_secrets
from etude.common.turns.turn_log import TurnLog
from etude.common.weights import VersionId
from etude.gateway.recording import SampledTurn, TurnRecorder
from etude.gateway.sessions import Branch
from etude.gateway.turn_request import RolloutMarks, TurnRequest
from etude.gateway.turn_text import TurnParts
from etude.v1 import turns_pb2

SECRET = "ghp_" + "a1B2" * 9
LEAK = f"Use {SECRET} for it."
CHAT = ChatFormat.load(Path(__file__).parents[1] / "agent" / "model")


def count_withheld(rule: str) -> float:
    return REGISTRY.get_sample_value("etude_gateway_withheld_turns_total", {"rule": rule}) or 0.0


def is_withheld(record: turns_pb2.TurnRecord) -> bool:
    has_tokens = record.prompt_token_ids or record.token_ids or record.logprobs
    assert bool(has_tokens) != record.HasField("withheld")
    return record.HasField("withheld")


async def test_a_turn_that_reads_a_secret_is_recorded_without_tokens_as_are_all_behind_it(
    gateway: ServedGateway,
) -> None:
    before = count_withheld("github")
    said = [user("One."), policy("Turn 1."), user(LEAK), policy("Turn 2."), user("Three.")]
    for end in (1, 3, 5):
        assert text_of(await ask(gateway, *said[:end])) == f"Turn {(end + 1) // 2}."
    first, second, third = await gateway.records()
    assert [is_withheld(each) for each in (first, second, third)] == [False, True, True]
    assert [*second.withheld.rules] == ["github"]
    assert second.withheld.num_tokens == sum(span.end for span in second.spans) > 0
    assert (second.num_calls, second.arm, second.branch) == (0, "stable", first.branch)
    assert count_withheld("github") == before + 2


async def test_a_turn_that_says_a_secret_is_withheld(serve: Any, plain: ChatFormat) -> None:
    async with serve(plain, lambda _: LEAK) as gateway:
        await ask(gateway, user("One."))
        (record,) = await gateway.records()
        assert is_withheld(record)


async def test_a_conversation_that_goes_on_before_the_secret_is_recorded_with_tokens(
    gateway: ServedGateway,
) -> None:
    said = [user("One."), policy("Turn 1.")]
    await ask(gateway, *said[:1])
    await ask(gateway, *said, user(LEAK))
    await ask(gateway, *said, user(LEAK), policy("Turn 2."), user("Three."))
    await ask(gateway, *said, user(LEAK), policy("Turn 2."), user("Otherwise."))
    await ask(gateway, *said, user("Without it."))
    records = await gateway.records()
    assert [is_withheld(each) for each in records] == [False, True, True, True, False]
    text = gateway.parts.app.service.chat.decode([*records[-1].prompt_token_ids])
    assert "Without it." in text
    assert SECRET not in text


async def test_a_secret_in_a_conversation_so_long_that_a_thread_searches_it_is_found(
    gateway: ServedGateway,
) -> None:
    gateway.engines[0].max_model_len = 1 << 20
    await ask(gateway, user("word " * 8_000 + LEAK))
    (record,) = await gateway.records()
    assert is_withheld(record)


async def record_turn(branch: Branch) -> turns_pb2.TurnRecord:
    """Record a turn that sampled the last token of a branch."""
    store = MemoryStore()
    recorder = TurnRecorder(TurnLog(store, 1 << 20), CHAT, None)
    version = VersionId(1, 1)
    spans = [PolicySpan(0, 1, version, version, "e")]
    turn = SampledTurn(
        turn_id="t",
        started_ns=1,
        caller=KeyOwner("alice", "acme", frozenset(), "v1", 60),
        request=TurnRequest(),
        marks=RolloutMarks(),
        arm="stable",
        experiment="",
        branch=branch,
        num_tokens=len(branch.token_ids),
        completion=Completion(branch.token_ids[-1:], [-0.5], spans, FinishReason.STOP),
        run_uid="run-1",
        parts=TurnParts("", "", ()),
    )
    recorder.record(turn)
    await recorder.finish()
    (record,) = recorder.log._waiting
    return record


@settings(max_examples=60)
@given(seed=st.integers(0, 1 << 30), part=st.floats(0, 1))
def test_a_secret_is_found_wherever_the_turn_before_ended(seed: int, part: float) -> None:
    planted = [*plant(len(FORMATS), seed=seed)][seed % len(FORMATS)]
    token_ids = CHAT.encode_text(f"Look.\n{planted.text}\nDone.\n")
    num_clean = int(part * (len(token_ids) - 1))
    # A few in a thousand are found by no rule.
    assume(find_secrets(CHAT.decode(token_ids).encode()))
    assume(not find_secrets(CHAT.decode(token_ids[:num_clean]).encode()))
    branch = Branch("r", token_ids=array("I", token_ids), num_clean=num_clean)
    record = asyncio.run(record_turn(branch))
    assert is_withheld(record)
    assert not is_left(planted.secret, str(record))
