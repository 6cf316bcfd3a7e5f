"""Data of a phase, for the model that it trains."""

from pathlib import Path

import pytest

from etude.agent.chat import DataFormat
from etude.common.api.run.phases import Phase
from etude.common.api.storage import Storage
from etude.common.errors import InvalidFieldError
from etude.trainer.learner.data.phase_data import DataReader
from etude.trainer.learner.data.rank_exchange import ProcessGroupExchange

MODEL = Path(__file__).parents[3] / "agent" / "model"


def test_sequences_longer_than_the_model_takes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "traces.jsonl").write_text('{"text": "words"}\n')
    reader = DataReader(
        chat=DataFormat(MODEL), context=64, storage=Storage(uri=f"file://{tmp_path}")
    )
    phase = {
        "name": "more",
        "type": "ContinuedPretraining",
        "maxSteps": 1,
        "optimizer": {"learningRate": "1e-3"},
        "data": [{"name": "traces", "uri": f"file://{tmp_path}/traces.jsonl"}],
        "batchTokens": 512,
    }
    ranks = ProcessGroupExchange(0, 1)

    def open_stream(sequence_tokens: int) -> object:
        given = Phase.model_validate(phase | {"sequenceTokens": sequence_tokens})
        return reader.open_stream(given, ranks=ranks, cursor="")

    assert open_stream(64)
    with pytest.raises(InvalidFieldError, match=r"phases\[more\].sequenceTokens: .*64 tokens"):
        open_stream(65)
