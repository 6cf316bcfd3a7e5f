"""Tokens of finished rollouts come back from the store as they were written, or not at all."""

import random
from collections.abc import Callable

import pytest
from typing_extensions import override

from etude.common.api.run.rollout_policy import RolloutPolicy
from etude.common.blobs import DeniedError, MemoryStore, MissingError
from etude.common.errors import CorruptError, InvalidFieldError, StoreError
from etude.common.weights import VersionId
from etude.trainer.contents import objects
from etude.trainer.contents.call_figures import call_figures
from etude.trainer.contents.content_checks import check_content
from etude.trainer.contents.measures import num_tokens, version_uses
from etude.trainer.contents.objects import (
    copy_tokens,
    read_links,
    restore_calls,
    restore_rollouts,
    write_links,
)
from etude.trainer.contents.rollout_checks import InvalidSpanError
from etude.trainer.rollouts.contents.content_writer import ContentWriter
from etude.trainer.rollouts.protocol import GroupRequest
from etude.trainer.routing.table import Purpose
from etude.v1 import journal_pb2, rewards_pb2, rollout_pb2, weights_pb2
from etude.v1.rollout_content_pb2 import ContentObject

V4, V5 = VersionId(1, 4), VersionId(1, 5)
KNOWN = {V4: 4, V5: 5}
PREFIX = "contents/g/"


def link(prompt: int, sampled: int, *, context: VersionId = V4) -> rollout_pb2.Link:
    span = weights_pb2.PolicySpan(
        sampled=V5.to_proto(),
        context=context.to_proto(),
        start=prompt,
        end=prompt + sampled,
        replica="engine-0",
    )
    return rollout_pb2.Link(
        token_ids=[7] * (prompt + sampled),
        loss_mask=bytes(prompt) + b"\x01" * sampled,
        sampler_logprobs=[-0.5] * (prompt + sampled),
        spans=[span],
    )


def scored(*links: rollout_pb2.Link, name: str = "g-0") -> journal_pb2.JournalRollout:
    return journal_pb2.JournalRollout(
        rollout=rollout_pb2.Rollout(
            rollout_id=name,
            group_id="g",
            links=links or [link(3, 5)],
            oldest=V4.to_proto(),
            newest=V5.to_proto(),
        ),
        reward=rewards_pb2.RewardRecord(rollout_id=name, reward=1.0),
    )


def request(**changed: object) -> GroupRequest:
    fields: dict[str, object] = {
        "group_id": "g",
        "task_id": "t",
        "task_uri": "file:///t",
        "environment": "repos",
        "indices": (0,),
        "seed": 0,
        "temperature": 1.0,
        "limits": RolloutPolicy(),
    }
    return GroupRequest(**(fields | changed))  # type: ignore[arg-type]


async def store_tokens(
    store: MemoryStore, record: journal_pb2.JournalRollout, **changed: object
) -> journal_pb2.JournalRollout:
    """The record as a worker hands it over."""
    handed = journal_pb2.JournalRollout()
    handed.CopyFrom(record)
    await ContentWriter(store=store, vocab_size=100).write(request(**changed), [handed])
    return handed


async def test_a_record_without_its_tokens_has_their_counts_and_gets_them_again() -> None:
    store, given = MemoryStore(), scored(link(3, 5), link(2, 4, context=V5), link(1, 2))
    handed = await store_tokens(store, given)
    assert not handed.rollout.links
    assert num_tokens(handed) == num_tokens(given) == 17
    assert list(version_uses(handed)) == list(version_uses(given))
    assert [use.tokens for use in version_uses(handed)] == [7, 4]
    assert list(restore_rollouts(store, [handed])) == [given]


async def test_calls_and_the_final_message_are_stored_and_measured_too() -> None:
    store, given = MemoryStore(), scored()
    given.rollout.final_message = "Should I go on?"
    for turn, name in enumerate(("read_file", "search_replace", "run_terminal")):
        given.rollout.calls.add(turn=turn, name=name, arguments_json='{"path": "a"}', result="x")
    given.rollout.calls.add(turn=3, is_malformed=True)
    handed = await store_tokens(store, given)
    assert not handed.rollout.calls
    assert not handed.rollout.final_message
    assert call_figures(handed) == call_figures(given)
    assert (handed.content.figures.calls, handed.content.figures.malformed) == (3, 1)
    assert handed.content.figures.has_read_before_edit
    assert list(restore_rollouts(store, [handed])) == [given]
    assert list(restore_calls(store, handed).rollout.calls) == list(given.rollout.calls)
    check_content(handed, prefix=PREFIX, max_tokens=1_000, position_of=KNOWN.get)


async def test_a_copy_has_the_tokens_of_every_rollout_and_nothing_that_they_name() -> None:
    store, target, given = MemoryStore(), MemoryStore(), scored(link(3, 5), link(2, 4))
    given.rollout.links[0].routes.key = "weights/manifests/00000001"
    store.put("weights/manifests/00000001", b"of another part")
    handed = await store_tokens(store, given)
    assert list(copy_tokens(store, target, [handed.content])) == list(given.rollout.links)
    assert list(restore_rollouts(target, [handed])) == [given]
    assert list(target.objects) == [handed.content.tokens.key]


async def test_the_size_of_a_record_does_not_depend_on_its_tokens() -> None:
    store = MemoryStore()
    small = await store_tokens(store, scored(link(3, 5)))
    large = await store_tokens(
        store, scored(link(3, 20_000)), limits=RolloutPolicy(max_tokens=32_768)
    )
    assert large.HasField("content")
    assert large.ByteSize() - small.ByteSize() < 16


async def test_who_writes_a_rollout_again_writes_the_same_object() -> None:
    store, given = MemoryStore(), scored()
    assert await store_tokens(store, given) == await store_tokens(store, given)
    assert len(store.objects) == 1
    other = scored(link(3, 6))
    assert (await store_tokens(store, other)).content != (await store_tokens(store, given)).content
    assert len(store.objects) == 2


async def test_tokens_larger_than_one_request_are_stored_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(objects, "MAX_CREATE_BYTES", 16)
    store, given = MemoryStore(), scored()
    assert list(restore_rollouts(store, [await store_tokens(store, given)])) == [given]


async def test_a_rollout_that_cannot_be_trained_on_is_masked_and_leaves_no_object() -> None:
    store = MemoryStore()
    given = scored()
    given.rollout.links[0].token_ids[2] = 100
    handed = await store_tokens(store, given)
    assert handed.reward.fault.reason == "InvalidRollout"
    assert "links[0].token_ids" in handed.rollout.fault
    assert not store.objects
    assert not handed.rollout.links
    given = scored()
    given.rollout.links[0].spans[0].end -= 1
    assert (await store_tokens(store, given)).reward.fault.reason == "InvalidSpan"


async def test_a_worker_waits_for_a_store_that_is_away_and_counts_its_attempts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Away(MemoryStore):
        failures = 2

        @override
        def create(self, key: str, data: bytes) -> None:
            if self.failures:
                self.failures -= 1
                raise StoreError("away")
            super().create(key, data)

    store, given = Away(), scored()
    assert await ContentWriter(store=store, vocab_size=100).write(request(), [given]) == 2
    assert given.content.tokens.key in store.objects
    assert caplog.text.count("tokens of rollout g-0 failed and is retried: away") == 2


@pytest.mark.parametrize("refused", ["g-0.", "g-0.calls"])
async def test_a_rollout_that_the_store_refuses_is_masked_at_once(refused: str) -> None:
    class Refusing(MemoryStore):
        @override
        def create(self, key: str, data: bytes) -> None:
            if refused in key:
                raise DeniedError("no right to write")
            super().create(key, data)

    first, second = scored(), scored(name="g-1")
    first.rollout.final_message = "Done."
    writer = ContentWriter(store=Refusing(), vocab_size=100)
    assert await writer.write(request(), [first, second]) == 0
    assert first.reward.fault.reason == "TokensNotStored"
    assert "no right to write" in first.rollout.fault
    assert not first.HasField("content")
    assert not first.rollout.links
    assert second.reward.WhichOneof("result") == "reward"
    assert second.HasField("content")


def damage(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (damage, CorruptError),
        (lambda data: data[:-1], StoreError),
        (lambda data: b"", StoreError),
        (None, MissingError),
    ],
)
async def test_tokens_that_are_not_those_accepted_are_never_returned(
    change: Callable[[bytes], bytes] | None, error: type[Exception]
) -> None:
    store = MemoryStore()
    handed = await store_tokens(store, scored())
    key = handed.content.tokens.key
    data = store.objects.pop(key)
    if change is not None:
        store.objects[key] = change(data)
    with pytest.raises(error):
        read_links(store, handed.content, "g-0")


async def test_an_object_of_another_rollout_or_of_other_counts_is_refused() -> None:
    store = MemoryStore()
    handed = await store_tokens(store, scored())
    with pytest.raises(CorruptError, match="not of 'g-1'"):
        read_links(store, handed.content, "g-1")
    handed.content.links[0].sampled -= 1
    with pytest.raises(CorruptError, match="numbers of tokens"):
        read_links(store, handed.content, "g-0")


async def test_evaluations_have_a_prefix_of_their_own() -> None:
    handed = await store_tokens(MemoryStore(), scored(), purpose=Purpose.EVALUATION)
    assert handed.content.tokens.key.startswith("contents-of-evaluations/g/g-0.")


HOSTILE: dict[str, Callable[[journal_pb2.JournalRollout], object]] = {
    "links": lambda r: r.rollout.links.add(),
    "content.tokens.key": lambda r: setattr(r.content.tokens, "key", "weights/manifest"),
    "content.tokens.key ": lambda r: setattr(r.content.tokens, "key", "contents/g/../../owner"),
    "content.tokens.key  ": lambda r: setattr(r.content.tokens, "key", "contents/h/h-0.ab"),
    "content.tokens.num_bytes": lambda r: setattr(r.content.tokens, "num_bytes", 0),
    "content.tokens.num_bytes ": lambda r: setattr(r.content.tokens, "num_bytes", 1 << 40),
    "content.tokens.digest": lambda r: setattr(r.content.tokens, "digest", b"short"),
    "content.calls.key": lambda r: r.content.calls.CopyFrom(ContentObject(key="owner")),
    "content.figures.edits": lambda r: setattr(r.content.figures, "edits", -1),
    "content.figures.looks_before_edit": lambda r: setattr(
        r.content.figures, "looks_before_edit", -1
    ),
    "content.figures.looks_before_edit ": lambda r: setattr(
        r.content.figures, "looks_before_edit", 1
    ),
    "content.figures.failed_edits": lambda r: setattr(r.content.figures, "failed_edits", 1),
    "content.figures.tools ": lambda r: r.content.figures.tools.update({"a": 2, "b": -2}),
    "content.figures.tools": lambda r: setattr(r.content.figures, "calls", 1),
    "content.links": lambda r: r.content.ClearField("links"),
    "content.links[0].tokens": lambda r: setattr(r.content.links[0], "tokens", 9_999),
    "content.links[0].sampled": lambda r: setattr(r.content.links[0], "sampled", 8),
    "content.links[0].sampled ": lambda r: setattr(r.content.links[0], "sampled", -1),
}
UNTRUE: dict[str, Callable[[journal_pb2.JournalRollout], object]] = {
    "content.uses": lambda r: r.content.ClearField("uses"),
    "content.uses[0]": lambda r: setattr(r.content.uses[0], "tokens", -5),
    "content.uses[0] ": lambda r: setattr(r.content.uses[0].sampled, "number", 6),
    "content.uses[0]  ": lambda r: r.content.uses[0].context.CopyFrom(VersionId(1, 9).to_proto()),
    "oldest": lambda r: setattr(r.rollout.oldest, "number", 5),
    "oldest ": lambda r: setattr(r.rollout.oldest, "epoch", 3),
}


async def check(change: Callable[[journal_pb2.JournalRollout], object]) -> None:
    handed = await store_tokens(MemoryStore(), scored())
    change(handed)
    check_content(handed, prefix=PREFIX, max_tokens=1_000, position_of=KNOWN.get)


async def test_what_a_worker_stored_is_accepted() -> None:
    await check(lambda record: None)


@pytest.mark.parametrize("field", HOSTILE)
async def test_an_impossible_content_is_refused_by_its_field(field: str) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        await check(HOSTILE[field])
    assert refused.value.field == field.strip()
    assert not isinstance(refused.value, InvalidSpanError)


@pytest.mark.parametrize("field", UNTRUE)
async def test_versions_that_cannot_be_true_are_refused_by_their_field(field: str) -> None:
    with pytest.raises(InvalidSpanError) as refused:
        await check(UNTRUE[field])
    assert refused.value.field == field.strip()


def test_counts_are_those_of_the_links_whatever_the_links_are() -> None:
    draw = random.Random(4)
    for _ in range(100):
        links = [
            link(draw.randint(1, 9), draw.randint(1, 9), context=draw.choice([V4, V5]))
            for _ in range(draw.randint(1, 5))
        ]
        record = scored(*links)
        content = write_links(MemoryStore(), PREFIX, record.rollout)
        sampled = sum(each.loss_mask.count(1) for each in links)
        assert sum(size.sampled for size in content.links) == sampled
        assert sum(use.tokens for use in content.uses) == sampled
