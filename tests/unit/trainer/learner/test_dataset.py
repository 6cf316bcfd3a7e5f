"""Which data makes up each supervised step."""

import json
from pathlib import Path

import numpy as np
import pytest
from tests.support.native_template import TEMPLATE, write_call
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from etude.agent.chat import CHAT_TEMPLATE, LAYOUT_TOKENS, ChatFormat
from etude.common.api.run.phases import Phase
from etude.common.api.storage import Storage
from etude.common.errors import UserError
from etude.trainer.learner.batches import SupervisedSequence
from etude.trainer.learner.dataset import BUCKET_BATCHES, SupervisedDataset, load_dataset


@pytest.fixture
def chat(tmp_path: Path) -> ChatFormat:
    alphabet = {byte: i for i, byte in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in LAYOUT_TOKENS])
    (tmp_path / "model").mkdir()
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "model" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    return ChatFormat.load(tmp_path / "model")


def phase(uri: str, **fields: object) -> Phase:
    dataset = {"name": "traces", "uri": uri, "contextWeight": "0.5"}
    return Phase.model_validate(
        {
            "name": "sft",
            "type": "SupervisedFineTuning",
            "maxSteps": 10,
            "optimizer": {"learningRate": "1e-3"},
            "data": [dataset],
            **fields,
        }
    )


def load(tmp_path: Path, chat: ChatFormat, *lines: str, context: int = 64) -> SupervisedDataset:
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    storage = Storage(uri=f"file://{tmp_path}/run")
    return load_dataset(
        phase(f"file://{tmp_path}/data.jsonl"), chat=chat, context=context, storage=storage
    )


def test_what_the_assistant_wrote_weighs_one_and_the_rest_the_context_weight(
    tmp_path: Path, chat: ChatFormat
) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]
    found = load(tmp_path, chat, json.dumps({"messages": messages})).sequences[0]
    # <|user|> h i <|end|> <|assistant|> o k <|end|>
    assert found.weights.tolist() == [0.5] * 5 + [1.0] * 3


def test_tools_of_a_transcript_are_shown_and_their_text_is_no_tag(
    tmp_path: Path, chat: ChatFormat
) -> None:
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    native = ChatFormat.load(tmp_path / "model")
    tools = [{"type": "function", "function": {"name": "f", "description": "<|end|>"}}]
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    row = {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ],
        "tools": tools,
    }
    for given in (tools, json.dumps(tools)):
        line = json.dumps({**row, "tools": given})
        (found,) = load(tmp_path, native, line, context=1_000).sequences
        ids = found.token_ids.tolist()
        assert native.decode(ids).startswith(f"<|system|>{json.dumps(tools[0])}\n<|end|><|user|>hi")
        assert ids.count(native.end_id) == 3
        own = [token for token, weight in zip(ids, found.weights, strict=True) if weight == 1]
        assert native.decode(own) == write_call("f", a=1) + "<|end|>"


def test_a_text_longer_than_the_context_is_cut_and_nothing_is_lost(
    tmp_path: Path, chat: ChatFormat
) -> None:
    found = load(tmp_path, chat, json.dumps({"text": "x" * 150})).sequences
    assert [s.token_ids.size for s in found] == [64, 64, 23]
    assert found[-1].token_ids[-1] == chat.end_id


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "not JSON"),
        ('{"prompt": "x"}', "neither"),
        ('{"messages": []}', "neither"),
        ('{"messages": [{"role": "judge", "content": "x"}]}', "role"),
        (json.dumps({"messages": [{"role": "user", "content": "x" * 100}]}), "102 tokens"),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": [1]}', "tools"),
        (
            '{"messages": [{"role": "user", "content": "x"}], "tools": "[{"}',
            "tools that are not JSON",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, chat: ChatFormat, line: str, what: str) -> None:
    with pytest.raises(UserError, match=rf"data.jsonl line 2.*{what}"):
        load(tmp_path, chat, '{"text": "good"}', line)


def test_a_missing_or_empty_file_is_named(tmp_path: Path, chat: ChatFormat) -> None:
    with pytest.raises(UserError, match="holds no sequence"):
        load(tmp_path, chat)
    with pytest.raises(UserError, match="is missing"):
        load_dataset(
            phase(f"file://{tmp_path}/nothing.jsonl"),
            chat=chat,
            context=64,
            storage=Storage(uri=f"file://{tmp_path}/run"),
        )


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path, chat: ChatFormat) -> None:
    with pytest.raises(UserError, match=r"cannot be read: Is a directory"):
        load_dataset(
            phase(tmp_path.as_uri()),
            chat=chat,
            context=64,
            storage=Storage(uri=f"file://{tmp_path}/run"),
        )


def corpus(size: int, *, batch_size: int = 4, seed: int = 3) -> SupervisedDataset:
    def sequence(index: int) -> SupervisedSequence:
        length = 1 + index * 7 % 50
        return SupervisedSequence(
            token_ids=np.full(length, index, np.int32), weights=np.ones(length, np.float32)
        )

    sequences = tuple(sequence(index) for index in range(size))
    return SupervisedDataset(sequences=sequences, batch_size=batch_size, seed=seed)


def names(data: SupervisedDataset, step: int) -> list[int]:
    return [int(sequence.token_ids[0]) for sequence in data.batch(step)]


def test_one_pass_uses_every_sequence_once() -> None:
    data = corpus(64)
    assert sorted(n for step in range(16) for n in names(data, step)) == list(range(64))


def test_the_batch_of_a_step_depends_on_seed_and_step_alone() -> None:
    assert names(corpus(50), 11) == names(corpus(50), 11)
    assert names(corpus(50), 11) != names(corpus(50, seed=4), 11)
    assert names(corpus(50), 11) != names(corpus(50), 27)


def test_sequences_of_a_batch_are_of_similar_length_and_short_batches_do_not_come_first() -> None:
    data = corpus(320, batch_size=8)
    longest = [max(s.token_ids.size for s in data.batch(step)) for step in range(BUCKET_BATCHES)]
    assert longest != sorted(longest)
    spread = [np.ptp([s.token_ids.size for s in data.batch(step)]) for step in range(40)]
    assert np.mean(spread) < 12


def test_a_corpus_smaller_than_a_batch_repeats() -> None:
    assert set(names(corpus(3), 0)) <= {0, 1, 2}
    assert len(names(corpus(3), 0)) == 4
