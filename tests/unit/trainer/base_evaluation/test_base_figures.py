"""Figures of base models, against transformers' log-probs, a Python interpreter, and counting."""

import contextlib
import io
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from etude.agent.chat.vocabulary import Vocabulary
from etude.common.errors import UserError
from etude.trainer.base_evaluation.questions import (
    Question,
    count_question_tokens,
    measure_choices,
    read_questions,
)
from etude.trainer.base_evaluation.scoring import ModelScorer, TokenSequence, encode_choices
from etude.trainer.base_evaluation.shared_prompts import score_choices, split_branches
from etude.trainer.base_evaluation.state_tracking import make_programs
from etude.trainer.base_evaluation.texts import measure_texts, read_texts
from etude.trainer.model.policy import load_policy

TOKENIZER = Path(__file__).parents[2] / "agent" / "model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("base")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).save_pretrained(made)
    (made / "tokenizer.json").write_bytes((TOKENIZER / "tokenizer.json").read_bytes())
    return made


@pytest.fixture(scope="module")
def scorer(folder: Path) -> ModelScorer:
    return ModelScorer(load_policy(folder, seed=0), Vocabulary.load(folder), 64, batch_tokens=150)


@pytest.fixture(scope="module")
def reference(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder)


SEQUENCES = st.lists(
    st.tuples(st.lists(st.integers(0, 1023), min_size=2, max_size=40), st.integers(1, 39)),
    min_size=1,
    max_size=6,
)


@given(SEQUENCES)
def test_scores_are_those_of_transformers_however_sequences_are_batched(
    scorer: ModelScorer, reference: LlamaForCausalLM, drawn: list[tuple[list[int], int]]
) -> None:
    sequences = [TokenSequence(ids, min(first, len(ids) - 1)) for ids, first in drawn]
    for found, (ids, first) in zip(scorer.score(sequences), sequences, strict=True):
        with torch.no_grad():
            logprobs = reference(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        wanted = sum(float(logprobs[at - 1, ids[at]]) for at in range(first, len(ids)))
        assert found == pytest.approx(wanted, abs=1e-4)


TOKENS = st.lists(st.integers(0, 1023), min_size=1, max_size=12)
GROUPS = st.lists(
    st.tuples(TOKENS, TOKENS, st.lists(TOKENS, min_size=1, max_size=4)), min_size=1, max_size=5
)


@given(GROUPS, st.booleans())
def test_choices_of_one_prompt_have_the_scores_that_they_have_alone(
    scorer: ModelScorer,
    drawn: list[tuple[list[int], list[int], list[list[int]]]],
    with_shared_beginning: bool,  # noqa: FBT001 - drawn
) -> None:
    groups = [
        [
            TokenSequence([*prompt, *(begin if with_shared_beginning else []), *end], len(prompt))
            for end in endings
        ]
        for prompt, begin, endings in drawn
    ]
    reported: list[tuple[int, int, int]] = []
    found = score_choices(scorer, groups, report=lambda *at: reported.append(at))
    for scores, sequences in zip(found, groups, strict=True):
        assert scores == pytest.approx(scorer.score(sequences), abs=1e-4)
    assert reported[-1] == (len(groups), len(groups), count_question_tokens(groups))


def test_a_prompt_goes_through_the_model_once(scorer: ModelScorer) -> None:
    seen: list[int] = []
    layer = scorer.policy.model.get_input_embeddings()
    hook = layer.register_forward_hook(
        lambda _layer, inputs, _output: seen.append(inputs[0].numel())
    )
    prompt = list(range(1, 31))
    groups = [[TokenSequence([*prompt, 7, digit], 30) for digit in range(100, 105)]] * 2
    score_choices(scorer, groups)
    assert seen == [62], "digits behind a shared space are read off one place"
    seen.clear()
    score_choices(scorer, [[TokenSequence([*prompt, 50 + n, 60, 70], 30) for n in range(4)]])
    assert seen == [30, 8]
    hook.remove()


def test_prompts_that_were_cut_differently_are_scored_apart(scorer: ModelScorer) -> None:
    sequences = encode_choices(
        scorer.vocabulary, "def f(x): return x\n" * 40, [" 7", " several words"], context=64
    )
    assert split_branches(sequences) is None
    assert score_choices(scorer, [sequences]) == [pytest.approx(scorer.score(sequences))]


def test_a_continuation_is_scored_behind_a_prompt_that_may_lose_its_beginning(
    scorer: ModelScorer,
) -> None:
    [sequence] = encode_choices(scorer.vocabulary, "x = 1\n" * 80, [" 7"], context=64)
    after = scorer.vocabulary.encode_text(" 7")
    assert len(sequence.token_ids) == 64
    assert [*sequence.token_ids[sequence.first :]] == after


@given(st.integers(0, 40), st.integers(0, 2**31 - 1))
def test_a_program_prints_its_answer(length: int, seed: int) -> None:
    [question] = make_programs(length, count=1, seed=seed)
    if length == 0:
        return
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(question.question, {})
    assert printed.getvalue() == f"{question.choices[question.answer]}\n"


def test_programs_are_the_same_for_the_same_seed() -> None:
    assert make_programs(8, count=5, seed=3) == make_programs(8, count=5, seed=3)
    assert make_programs(8, count=5, seed=3) != make_programs(8, count=5, seed=4)


def test_bits_per_byte_count_each_byte_of_the_text(scorer: ModelScorer) -> None:
    text = "def add(a, b):\n    return a + b\n" * 20
    figures = measure_texts(scorer, [text])
    ids = scorer.vocabulary.encode_text(text)
    assert figures.num_bytes == len(text)
    assert figures.tokens == len(ids) - math.ceil(len(ids) / scorer.context)
    nats = figures.bits_per_byte * math.log(2) * figures.num_bytes
    assert math.exp(nats / figures.tokens) == pytest.approx(figures.perplexity)


def test_the_likeliest_choice_by_byte_is_the_answer(scorer: ModelScorer) -> None:
    prompt, choices = "Question: Which?\nAnswer:", ("one", "two three")
    sequences = encode_choices(
        scorer.vocabulary, prompt, [f" {each}" for each in choices], context=64
    )
    scores = [
        score / len(each) for score, each in zip(scorer.score(sequences), choices, strict=True)
    ]
    best = scores.index(max(scores))
    right = Question(question="Which?", choices=choices, answer=best)
    wrong = Question(question="Which?", choices=choices, answer=1 - best)
    figures = measure_choices(scorer, [right, right, wrong, wrong])
    assert (figures.accuracy, figures.chance) == (0.5, 0.5)
    assert figures.standard_error == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ("{", "is not JSON"),
        ('{"question": "x", "choices": ["a"], "answer": 0}', "choices"),
        ('{"question": "x", "choices": ["a", "b"], "answer": 2}', "answer: 2 is not below 2"),
        ('{"question": "x", "choices": ["a", "b"]}', "answer"),
    ],
)
def test_a_wrong_question_is_refused_by_row_and_field(tmp_path: Path, row: str, what: str) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(f'{{"question": "x", "choices": ["a", "b"], "answer": 1}}\n{row}\n')
    with pytest.raises(UserError, match=what) as caught:
        read_questions(file)
    assert "questions.jsonl:2" in str(caught.value)


def test_texts_are_read_from_rows_files_and_folders_up_to_a_size(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "one"}) + "\n" + '{"text": "two"}\n')
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.py").write_text("x = 1\n")
    (tmp_path / "folder" / "b.bin").write_bytes(b"\xff\xfe")
    (tmp_path / "folder" / ".git").mkdir()
    (tmp_path / "folder" / ".git" / "config").write_text("[core]\n")
    assert read_texts(tmp_path / "a.jsonl", limit_bytes=100) == ["one", "two"]
    assert read_texts(tmp_path / "a.jsonl", limit_bytes=4) == ["one", "t"]
    assert read_texts(tmp_path / "folder", limit_bytes=100) == ["x = 1\n"]
    (tmp_path / "b.jsonl").write_text('{"txt": "one"}\n')
    with pytest.raises(UserError, match="has no `text`"):
        read_texts(tmp_path / "b.jsonl", limit_bytes=100)
    with pytest.raises(UserError, match="has no text"):
        read_texts(tmp_path / "folder" / "b.bin", limit_bytes=100)
