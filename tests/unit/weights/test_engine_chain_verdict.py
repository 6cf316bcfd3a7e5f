"""The judge of what real engines answer under faults: it lets good answers by, and no others."""

from typing import Any

import pytest
from tests.harness.chaos.engines.verdict import wrongs
from tests.harness.chaos.verdict import Epoch

from etude.common.weights import VersionId

LEDGER: dict[str, Any] = {f"1.{n}": {} for n in range(6)} | {"2.6": {}}
EPOCHS = {1: Epoch(None, 0.0), 2: Epoch(VersionId(1, 3), 10.0)}


def answer(*spans: tuple[str, int, int], tokens: int = 10, **other: Any) -> dict[str, Any]:
    found = {"tokens": tokens, "logprobs": tokens, "asked": 10, "are_sound": True}
    return found | {"spans": [[*span, "e0.1"] for span in spans]} | other


@pytest.mark.parametrize(
    "good",
    [
        answer(("1.2", 0, 10)),
        answer(("1.2", 0, 4), ("1.3", 4, 10)),
        answer(("1.5", 0, 4), ("1.3", 4, 6), ("2.6", 6, 10)),
    ],
    ids=["one version", "a swap", "a roll-back"],
)
def test_answers_that_may_be_are_let_by(good: dict[str, Any]) -> None:
    assert list(wrongs(good, LEDGER, EPOCHS)) == []


@pytest.mark.parametrize(
    ("bad", "sign"),
    [
        (answer(), "do not cover"),
        (answer(("1.2", 0, 9)), "do not cover"),
        (answer(("1.2", 1, 10)), "do not cover"),
        (answer(("1.2", 0, 4), ("1.3", 5, 10)), "do not cover"),
        (answer(("1.2", 0, 10), ("1.3", 10, 10)), "empty span"),
        (answer(("1.9", 0, 10)), "never published"),
        (answer(("1.3", 0, 4), ("1.2", 4, 10)), "nobody left behind"),
        (answer(("1.2", 0, 4), ("1.2", 4, 10)), "nobody left behind"),
        (answer(("1.2", 0, 9), tokens=9), "9 tokens"),
        (answer(("1.2", 0, 10), logprobs=9), "9 log-probs"),
        (answer(("1.2", 0, 10), are_sound=False), "log-prob"),
    ],
)
def test_what_is_wrong_with_an_answer_is_named(bad: dict[str, Any], sign: str) -> None:
    assert any(sign in wrong for wrong in wrongs(bad, LEDGER, EPOCHS))
