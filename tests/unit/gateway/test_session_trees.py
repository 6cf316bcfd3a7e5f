"""Conversations continue their branch token by token, and anything else is a branch of its own."""

import asyncio
import itertools
from typing import Any

import httpx
import pytest
from tests.support.gateway.served import MODEL, ServedGateway

from etude.agent.chat import ChatFormat
from etude.common.api_keys import make_key
from etude.common.turns.turn_log import identify_rollout
from etude.gateway.sessions import digest_beginnings
from etude.gateway.turn_request import WireCall, WireMessage
from etude.gateway.turns import THREAD_CHARS
from etude.v1 import turns_pb2

Turn = dict[str, Any]
PARTS = ("", "a", "1 a", "user 1 a", "[]", '[["a", {}]]', "\ud800")
"""Of contents that could be taken for the writing of another message."""


def user(text: str) -> Turn:
    return {"role": "user", "content": text}


def policy(text: str) -> Turn:
    return {"role": "assistant", "content": text}


async def ask(gateway: ServedGateway, *messages: Turn, **headers: str) -> httpx.Response:
    names = {f"x-etude-{name.replace('_', '-')}": value for name, value in headers.items()}
    async with httpx.AsyncClient() as client:
        answer = await client.post(
            f"{gateway.url}/v1/chat/completions",
            headers={"authorization": f"Bearer {gateway.key}", **names},
            json={"model": MODEL, "messages": messages},
            timeout=30,
        )
    assert answer.status_code == 200, answer.text
    return answer


def text_of(answer: httpx.Response) -> str:
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def join_branches(records: list[turns_pb2.TurnRecord]) -> dict[str, list[int]]:
    """Tokens of each branch, put together from its records alone."""
    joined: dict[str, list[int]] = {}
    for record in records:
        tokens = joined.setdefault(record.branch, [])
        assert len(tokens) == record.num_prefix_tokens
        tokens += [*record.prompt_token_ids, *record.token_ids]
    return joined


async def test_a_conversation_is_one_branch_whose_tokens_are_never_made_again(
    gateway: ServedGateway,
) -> None:
    messages = [user("One.")]
    for number in range(1, 4):
        answer = await ask(gateway, *messages)
        assert text_of(answer) == f"Turn {number}."
        # Some clients strip, some add blanks.
        messages += [policy(f" Turn {number}.\n"), user(f"And then, {number}?")]
    requests = [[*each.prompt_token_ids] for each in gateway.engines[0].requests]
    records = await gateway.records()
    assert len({record.rollout_id for record in records}) == 1
    ((branch, tokens),) = join_branches(records).items()
    assert branch
    assert tokens[: len(requests[-1])] == requests[-1]
    assert all(each == tokens[: len(each)] for each in requests)


async def test_a_conversation_is_what_the_template_writes(
    gateway: ServedGateway, plain: ChatFormat
) -> None:
    opening = [{"role": "system", "content": "Be brief."}, user("One.")]
    await ask(gateway, *opening)
    whole = [*opening, policy("Turn 1."), user("Two.")]
    await ask(gateway, *whole)
    request = gateway.engines[0].requests[-1]
    expected = plain.encode_messages([*whole, policy("x")]).token_ids
    end = len(request.prompt_token_ids)
    assert [*request.prompt_token_ids] == expected[:end]


async def test_a_turn_that_is_asked_for_again_is_a_branch_split_off(
    gateway: ServedGateway,
) -> None:
    await ask(gateway, user("One."))
    first = await ask(gateway, user("One."), policy("Turn 1."), user("Two."))
    again = await ask(gateway, user("One."), policy("Turn 1."), user("Otherwise."))
    assert first.headers["x-etude-rollout"] == again.headers["x-etude-rollout"]
    assert first.headers["x-etude-branch"] != again.headers["x-etude-branch"]
    *_, record = await gateway.records()
    assert record.parent_branch == first.headers["x-etude-branch"]
    join_branches(await gateway.records())


async def test_a_turn_that_is_asked_for_twice_at_once_has_two_branches(
    gateway: ServedGateway,
) -> None:
    await ask(gateway, user("One."))
    # So long that it is tokenised in a thread.
    said = [user("One."), policy("Turn 1."), user("word " * (THREAD_CHARS // 4))]
    gateway.engines[0].max_model_len = 1 << 20
    gateway.parts.app.service.fleets["stable"]._info = None
    answers = await asyncio.gather(*(ask(gateway, *said) for _ in range(4)))
    branches = [answer.headers["x-etude-branch"] for answer in answers]
    assert len({*branches}) == 4
    records = await gateway.records()
    joined = join_branches(records)
    assert branches.count(records[0].branch) == 1
    assert {len(joined[branch]) for branch in branches} == {len(joined[records[0].branch])}


async def test_an_edited_turn_continues_the_longest_beginning_that_is_exact(
    gateway: ServedGateway,
) -> None:
    await ask(gateway, user("One."))
    await ask(gateway, user("One."), policy("Turn 1."), user("Two."))
    edited = [user("One."), policy("Turn 1."), user("Two."), policy("Not so."), user("Three.")]
    await ask(gateway, *edited)
    first, _, third = ([*each.prompt_token_ids] for each in gateway.engines[0].requests)
    records = await gateway.records()
    sampled = [*first, *records[0].token_ids]
    assert third[: len(sampled)] == sampled
    # Nobody knows whether the user consented to the words of the edit.
    assert "Not so." in gateway.parts.app.service.chat.decode(third)
    assert len(records) == 2


async def test_a_history_that_nobody_sampled_starts_a_rollout(gateway: ServedGateway) -> None:
    known = await ask(gateway, user("One."))
    other = await ask(gateway, user("One."), policy("Never said."), user("Two."))
    assert known.headers["x-etude-rollout"] != other.headers["x-etude-rollout"]


async def test_marks_join_branches_to_one_rollout(gateway: ServedGateway) -> None:
    main = await ask(gateway, user("One."), rollout="task-7")
    helper = await ask(gateway, user("Look for it."), rollout="task-7")
    branch = main.headers["x-etude-branch"]
    summary = await ask(gateway, user("So far: done."), rollout="task-7", compaction_of=branch)
    records = await gateway.records()
    rollout = identify_rollout("acme", "alice", "task-7")
    assert {record.rollout_id for record in records} == {rollout}
    assert summary.headers["x-etude-rollout"] == "task-7"
    # The summary may repeat what was said without consent.
    assert [record.branch for record in records] == [branch, helper.headers["x-etude-branch"]]
    assert summary.headers["x-etude-branch"] not in {branch, records[1].branch}
    assert helper.headers["x-etude-branch"] == records[1].branch


async def test_a_side_turn_leaves_the_branch_to_the_conversation(gateway: ServedGateway) -> None:
    first = await ask(gateway, user("One."))
    await ask(gateway, user("One."), policy("Turn 1."), user("A title, please."), side="1")
    await ask(gateway, user("One."), policy("Turn 1."), user("Two."))
    records = await gateway.records()
    assert [record.is_side for record in records] == [False, True, False]
    assert records[2].branch == records[0].branch == first.headers["x-etude-branch"]
    assert records[1].branch != records[0].branch


async def test_conversations_of_another_user_are_not_continued(gateway: ServedGateway) -> None:
    key, line = make_key("bob", "serve")
    lines = gateway.keys_file.read_text()
    gateway.keys_file.write_text(f"{lines}{line} tenant=acme consent=v1\n")
    gateway.parts.app.keys.reload()
    first = await ask(gateway, user("One."))
    marked = await ask(gateway, user("Mine."), rollout="main")
    gateway.key = key
    second = await ask(gateway, user("One."), policy("Turn 1."), user("Two."))
    assert first.headers["x-etude-rollout"] != second.headers["x-etude-rollout"]
    # Both may give their rollouts the same name.
    theirs = await ask(gateway, user("Mine."), rollout="main")
    assert theirs.headers["x-etude-rollout"] == marked.headers["x-etude-rollout"] == "main"
    assert len({record.rollout_id for record in await gateway.records()}) == 3


async def test_a_record_has_all_that_training_needs(
    gateway: ServedGateway, plain: ChatFormat
) -> None:
    await ask(gateway, user("One."))
    (record,) = await gateway.records()
    (request,) = gateway.engines[0].requests
    assert [*record.prompt_token_ids] == [*request.prompt_token_ids]
    assert [*record.token_ids] == plain.completion("Turn 1.")
    assert len(record.logprobs) == len(record.token_ids)
    assert [(span.start, span.end, span.sampled.number) for span in record.spans][-1][1:] == (
        len(record.token_ids),
        3,
    )
    assert (record.tenant, record.user, record.consent, record.arm) == (
        "acme",
        "alice",
        "v1",
        "stable",
    )
    assert len(record.config_hash) == 16
    assert record.run_uid == "run-1"


async def test_the_config_hash_changes_with_the_prompt_and_not_with_the_question(
    gateway: ServedGateway,
) -> None:
    for system in ("Be brief.", "Be brief.", "Be thorough."):
        await ask(gateway, {"role": "system", "content": system}, user("One."))
    await ask(gateway, {"role": "system", "content": "Be brief."}, user("Two."))
    hashes = [record.config_hash for record in await gateway.records()]
    assert hashes[0] == hashes[1] == hashes[3] != hashes[2]


async def test_without_consent_a_turn_is_served_and_not_recorded(gateway: ServedGateway) -> None:
    lines = gateway.keys_file.read_text()
    gateway.keys_file.write_text(lines.replace(" consent=v1", ""))
    gateway.parts.app.keys.reload()
    assert text_of(await ask(gateway, user("One."))) == "Turn 1."
    gateway.keys_file.write_text(lines)
    gateway.parts.app.keys.reload()
    # It repeats what was said without consent.
    await ask(gateway, user("One."), policy("Turn 1."), user("Two."))
    assert await gateway.records() == []
    await ask(gateway, user("Another."))
    (record,) = await gateway.records()
    request = gateway.engines[0].requests[-1]
    assert [*record.prompt_token_ids] == [*request.prompt_token_ids]


@pytest.mark.parametrize("is_key_taken", [False, True])
async def test_consent_that_is_taken_back_while_a_turn_runs_keeps_it_private(
    serve: Any, plain: ChatFormat, *, is_key_taken: bool
) -> None:
    def take_back(_prompt: str) -> str:
        lines = gateway.keys_file.read_text()
        others = make_key("bob", "serve")[1]
        gateway.keys_file.write_text(others if is_key_taken else lines.replace(" consent=v1", ""))
        gateway.parts.app.keys.reload()
        return "Turn 1."

    async with serve(plain, take_back) as gateway:
        assert text_of(await ask(gateway, user("One."))) == "Turn 1."
        assert await gateway.records() == []


async def test_what_was_said_before_consent_stays_private_once_it_is_forgotten(
    gateway: ServedGateway,
) -> None:
    lines = gateway.keys_file.read_text()
    gateway.keys_file.write_text(lines.replace(" consent=v1", ""))
    gateway.parts.app.keys.reload()
    await ask(gateway, user("One."))
    gateway.keys_file.write_text(lines)
    gateway.parts.app.keys.reload()
    gateway.parts.app.service.sessions._nodes.clear()
    said = [user("One."), policy("Turn 1."), user("Two.")]
    await ask(gateway, *said)
    await ask(gateway, *said, policy("Turn 2."), user("Three."))
    assert await gateway.records() == []


async def test_a_session_that_was_forgotten_is_tokenised_again(
    serve: Any, plain: ChatFormat
) -> None:
    def count(prompt: str) -> str:
        return f"Turn {prompt.count('<|assistant|>')}."

    async with serve(plain, count) as gateway:
        gateway.parts.app.service.sessions.max_tokens = 1
        first = await ask(gateway, user("One."))
        await ask(gateway, user("Other."))
        again = await ask(gateway, user("One."), policy("Turn 1."), user("Two."))
        assert text_of(again) == "Turn 2."
        assert first.headers["x-etude-rollout"] != again.headers["x-etude-rollout"]


@pytest.mark.parametrize("share", [0, 5000])
async def test_the_arm_of_the_authenticated_user_chooses_the_engines(
    serve: Any, plain: ChatFormat, share: int
) -> None:
    experiment = {"name": "longer", "salt": "s", "share": share}
    # Alice is in the control: this canary is asked nothing.
    route = {"experiment": experiment, "canary": ["127.0.0.1:1"]}
    async with serve(plain, lambda _: "Yes.", route=route) as gateway:
        await ask(gateway, user("One."), rollout="mine")
        await ask(gateway, user("Two."))
        arms = {(record.arm, record.experiment) for record in await gateway.records()}
        assert len(arms) == 1
        (arm, name), *_ = arms
        assert (arm in {"control", "treatment"}, name) == (
            (True, "longer") if share else (False, "")
        )


def test_two_messages_have_one_digest_only_if_they_are_equal() -> None:
    contents = {"".join(parts) for parts in itertools.product(PARTS, repeat=2)}
    calls = [(), *((WireCall("c1", name, {}),) for name in PARTS)]
    messages = {*itertools.starmap(WireMessage, itertools.product(["user", "tool"], contents))}
    listed = [message._replace(calls=each) for message in messages for each in calls]
    digests = {digest_beginnings(b"owner", [message])[-1] for message in listed}
    assert len(digests) == len(listed)
