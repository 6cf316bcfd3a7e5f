"""Questions with choices, answered by the likeliest continuation."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from etude.common.errors import Problem, UserError
from etude.trainer.base_evaluation.scoring import (
    ModelScorer,
    Report,
    TokenSequence,
    encode_choices,
)
from etude.trainer.base_evaluation.shared_prompts import count_tokens, score_choices

ASKED = "Question: {}\nAnswer:"
"""Prompt of a question."""


class Question(BaseModel):
    """A prompt, its possible continuations, and the place of the right one."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    question: Annotated[str, Field(min_length=1)]
    choices: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=2)]
    answer: Annotated[int, Field(ge=0)]
    """Place in choices, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceFigures:
    """Figures of a set of questions."""

    questions: int
    accuracy: float
    """Share whose right choice has the highest log-prob for each of its bytes."""
    standard_error: float
    chance: float
    """Accuracy of a guess."""

    def to_json(self) -> dict[str, float]:
        """The figures by name."""
        return asdict(self)


def read_questions(path: Path) -> list[Question]:
    """Read a JSONL file of questions.

    Raises:
        UserError: there is none, or a row is not one; the row and the field are named.
    """
    if not path.is_file():
        raise UserError(Problem("NotFound", "does not exist", str(path), "correct the path"))
    questions = []
    text = path.read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        fix = 'write {"question": "…", "choices": ["…", "…"], "answer": 0} in each line'
        try:
            found = Question.model_validate(json.loads(line))
        except ValidationError as cause:
            first = cause.errors()[0]
            what = f"{'.'.join(map(str, first['loc'])) or 'the row'}: {first['msg']}"
            raise UserError(Problem("InvalidData", what, where, fix)) from cause
        except ValueError as cause:
            raise UserError(Problem("InvalidData", f"is not JSON: {cause}", where, fix)) from cause
        if found.answer >= len(found.choices):
            what = (
                f"answer: {found.answer} is not below {len(found.choices)}, the number of choices"
            )
            raise UserError(Problem("InvalidData", what, where, fix))
        questions.append(found)
    if not questions:
        raise UserError(Problem("InvalidData", "has no question", str(path), "add some"))
    return questions


def encode_questions(
    scorer: ModelScorer, questions: Sequence[Question], *, template: str = ASKED
) -> list[list[TokenSequence]]:
    """Encode each question with each of its choices."""
    return [
        encode_choices(
            scorer.vocabulary,
            template.format(each.question),
            [f" {choice}" for choice in each.choices],
            context=scorer.context,
        )
        for each in questions
    ]


def count_question_tokens(groups: Sequence[Sequence[TokenSequence]]) -> int:
    """Number of tokens of encoded questions, as their progress counts them."""
    return sum(map(count_tokens, groups))


def measure_choices(
    scorer: ModelScorer,
    questions: Sequence[Question],
    *,
    template: str = ASKED,
    report: Report | None = None,
) -> ChoiceFigures:
    """Answer questions by the choice with the highest log-prob for each byte.

    By byte, so that a long choice has no disadvantage, whatever the tokenizer. Choices of a
    question share one pass over its prompt.
    """
    groups = encode_questions(scorer, questions, template=template)
    right = []
    for each, scores in zip(questions, score_choices(scorer, groups, report=report), strict=True):
        by_byte = [
            score / len(choice.encode()) for score, choice in zip(scores, each.choices, strict=True)
        ]
        right.append(int(np.argmax(by_byte)) == each.answer)
    accuracy = sum(right) / len(right)
    return ChoiceFigures(
        questions=len(questions),
        accuracy=accuracy,
        standard_error=math.sqrt(accuracy * (1 - accuracy) / len(right)),
        chance=sum(1 / len(each.choices) for each in questions) / len(questions),
    )
