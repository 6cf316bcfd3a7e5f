"""No checkpoint has weights from which nobody could go on."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from etude.common.blobs import Store
from etude.trainer.export.receipts import NonFiniteWeightsError
from etude.trainer.learner.learner import Learner

Build = Callable[..., Learner]

PHASE = {
    "name": "sft",
    "type": "SupervisedFineTuning",
    "maxSteps": 9,
    "optimizer": {"learningRate": "1e-5"},
    "data": [{"name": "traces", "uri": "file:///traces.jsonl"}],
}
LARGE = 3.4e38
"""A number in 32 bits; in BF16 it is rounded to infinity."""


@pytest.fixture
def learner_with(build: Build) -> Callable[..., Learner]:
    """A learner of which one weight is given."""

    def make(value: float, **settings: Any) -> Learner:
        learner = build(**settings)
        learner.start_phase(PHASE, 0)
        with torch.no_grad():
            learner.policy.model.get_parameter("model.norm.weight")[3] = value
        return learner

    return make


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(torch.nan, "Float32"), (-torch.inf, "BFloat16"), (LARGE, "BFloat16")],
)
def test_weights_that_are_no_numbers_are_not_saved(
    learner_with: Callable[..., Learner], store: Store, value: float, dtype: str
) -> None:
    learner = learner_with(value, dtype=dtype)
    before = list(store.list(""))
    with pytest.raises(NonFiniteWeightsError, match="no checkpoint was written: 1 weights"):
        learner.copy_state("checkpoints/1")
    assert list(store.list("")) == before


@pytest.mark.parametrize(
    ("value", "settings"),
    [(LARGE, {"dtype": "Float32"}), (torch.nan, {"advanced": {"allowNonFinite": True}})],
)
def test_what_may_be_published_is_saved(
    learner_with: Callable[..., Learner], store: Store, value: float, settings: dict[str, Any]
) -> None:
    learner = learner_with(value, **settings)
    learner.copy_state("checkpoints/1")
    learner.save("checkpoints/1")
    assert [info.key for info in store.list("checkpoints/1/")]
