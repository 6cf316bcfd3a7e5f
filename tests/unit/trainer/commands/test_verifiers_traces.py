"""Rollouts as traces: every token in one message, and journals read into lines."""

import json
import math
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent.chat import ChatFormat
from etude.agent.chat.pieces import PieceReader
from etude.common.blobs import open_store
from etude.common.durable_log import encode_segment
from etude.demo import corpus, model_folder, tokenizer
from etude.demo.problems import Source
from etude.trainer.commands import traces, verifiers_traces
from etude.trainer.contents.objects import write_links
from etude.trainer.controller.journal import segments
from etude.trainer.controller.journal.audit import JOURNAL
from etude.v1 import journal_pb2, rewards_pb2, rollout_pb2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    shown = corpus.demonstrate_all(Source(1).take("traces", 20), 1)
    texts = (text for each in shown for text in corpus.transcript_texts(each.messages))
    model_folder.write(folder, tokenizer.train(texts))
    return folder


@pytest.fixture(scope="module")
def chat(model: Path) -> ChatFormat:
    return ChatFormat.load(model)


@pytest.fixture(scope="module")
def reader(chat: ChatFormat) -> PieceReader:
    return PieceReader.of(chat)


_TOKENS = st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=40)


@given(tokens=_TOKENS)
def test_whatever_a_context_holds_every_token_is_in_one_message(
    tokens: list[tuple[int, bool]], reader: PieceReader
) -> None:
    link = rollout_pb2.Link(
        token_ids=[token for token, _ in tokens],
        loss_mask=bytes(sampled for _, sampled in tokens),
        sampler_logprobs=[-float(place) for place in range(len(tokens))],
    )
    rollout = rollout_pb2.Rollout(rollout_id="r", links=[link], ending=rollout_pb2.ENDING_STOPPED)
    nodes = verifiers_traces.trace(journal_pb2.JournalRollout(rollout=rollout), reader)["nodes"]
    assert [token for node in nodes for token in node["token_ids"]] == list(link.token_ids)
    assert [flag for node in nodes for flag in node["mask"]] == [sampled for _, sampled in tokens]
    logprobs = [value for node in nodes for value in node.get("logprobs", [])]
    expected = [p for p, (_, sampled) in zip(link.sampler_logprobs, tokens, strict=True) if sampled]
    assert logprobs == expected
    assert [node["parent"] for node in nodes] == [None, *range(len(nodes) - 1)][: len(nodes)]


def test_a_token_without_a_finite_logprob_is_no_sampled_one_and_its_text_stays(
    chat: ChatFormat, reader: PieceReader
) -> None:
    ids = chat.completion("Done.")
    link = rollout_pb2.Link(
        token_ids=[1, *ids],
        loss_mask=bytes([0, *[1] * len(ids)]),
        sampler_logprobs=[0.0, math.nan, *[-0.5] * (len(ids) - 1)],
    )
    rollout = rollout_pb2.Rollout(rollout_id="r", links=[link], ending=rollout_pb2.ENDING_STOPPED)
    trace = verifiers_traces.trace(journal_pb2.JournalRollout(rollout=rollout), reader)
    node = json.loads(json.dumps(trace, allow_nan=False))["nodes"][-1]
    assert sum(node["mask"]) == len(node["logprobs"]) == len(ids) - 1
    assert node["message"]["content"] == "Done."


def _journal(folder: Path, *names: str) -> None:
    store = open_store(folder.resolve().as_uri())
    for number, name in enumerate(names):
        rollout = rollout_pb2.Rollout(
            rollout_id=name, task_id="t", ending=rollout_pb2.ENDING_STOPPED
        )
        scored = journal_pb2.JournalRollout(
            rollout=rollout, reward=rewards_pb2.RewardRecord(reward=1.0)
        )
        record = journal_pb2.JournalRecord(sequence=number, rollout=scored)
        data = encode_segment("u", 1, first=number, frames=[segments.encode_record(record)])
        store.create(f"{JOURNAL}{number:04d}", data)


def _store_tokens(folder: Path, name: str) -> str:
    """Journal a rollout whose tokens are in the store; return their key."""
    store = open_store(folder.resolve().as_uri())
    rollout = rollout_pb2.Rollout(rollout_id=name, task_id="t", ending=rollout_pb2.ENDING_STOPPED)
    rollout.links.add(token_ids=[1, 2], loss_mask=b"\0\1", sampler_logprobs=[0, -1])
    scored = journal_pb2.JournalRollout(
        content=write_links(store, "contents/g/", rollout),
        reward=rewards_pb2.RewardRecord(reward=1.0),
    )
    rollout.ClearField("links")
    scored.rollout.CopyFrom(rollout)
    record = journal_pb2.JournalRecord(sequence=9, rollout=scored)
    data = encode_segment("u", 1, first=9, frames=[segments.encode_record(record)])
    store.create(f"{JOURNAL}0-{name}", data)
    return scored.content.tokens.key


def _run(monkeypatch: pytest.MonkeyPatch, folder: Path, model: Path) -> int:
    words = ["traces", folder.resolve().as_uri(), "--model", str(model)]
    monkeypatch.setattr(sys, "argv", words)
    try:
        traces.main()
    except SystemExit as ending:
        return int(ending.code or 0)
    return 0


def test_each_rollout_of_a_journal_is_one_line_once(
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _journal(tmp_path, "a", "b", "a")
    assert _run(monkeypatch, tmp_path, model) == 0
    assert [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()] == ["a", "b"]


def test_what_is_missing_and_what_is_damaged_are_told_apart(
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _run(monkeypatch, tmp_path, model) == 3
    assert "holds no journal" in capsys.readouterr().err
    assert _run(monkeypatch, tmp_path, tmp_path) == 3
    _journal(tmp_path, "a")
    (damaged,) = (tmp_path / JOURNAL).iterdir()
    damaged.write_bytes(damaged.read_bytes()[:-3])
    assert _run(monkeypatch, tmp_path, model) == 1
    assert "journal/0000" in capsys.readouterr().err


def test_a_rollout_that_cannot_be_read_is_named_and_the_others_are_printed(
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _journal(tmp_path, "a")
    lost, _ = _store_tokens(tmp_path, "lost"), _store_tokens(tmp_path, "whole")
    (tmp_path / lost).unlink()
    assert _run(monkeypatch, tmp_path, model) == 1
    printed = capsys.readouterr()
    ids = [json.loads(line)["id"] for line in printed.out.splitlines()]
    assert sorted(ids) == ["a", "whole"]
    assert printed.err.startswith("lost is left out: ")
    assert lost in printed.err
