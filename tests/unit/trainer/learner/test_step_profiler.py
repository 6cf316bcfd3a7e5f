"""Traces of the steps that a phase asks for."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typing_extensions import override

from etude.common.api.run.phases import Phase
from etude.common.api.storage import Storage
from etude.common.blobs import MemoryStore
from etude.common.errors import StoreError
from etude.trainer.learner.batches import PolicyBatch, PolicySequence
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.rank import LearnerRank
from etude.trainer.learner.step_profiler import profile_step

MODEL = Path(__file__).parents[3] / "data" / "tiny-model"
RL: dict[str, Any] = {
    "name": "rl",
    "type": "ReinforcementLearning",
    "maxSteps": 5,
    "optimizer": {"learningRate": "1e-3"},
    "tasks": [{"name": "train", "uri": "file:///tasks", "environment": "repos"}],
    "algorithm": {"groupSize": 2},
}


def batch() -> PolicyBatch:
    return PolicyBatch(
        sequences=tuple(
            PolicySequence(
                token_ids=np.arange(8, dtype=np.int32),
                loss_mask=np.arange(8) > 3,
                sampler_logprobs=np.full(8, -4.0, np.float32),
                rollout=rollout,
            )
            for rollout in range(2)
        ),
        rewards=np.array([0.0, 1.0]),
        groups=np.array([0, 0]),
        valid=np.array([True, True]),
    )


def test_the_steps_that_a_phase_names_leave_a_trace_in_the_store(tmp_path: Path) -> None:
    rank = LearnerRank(
        LearnerConfig(
            run="uid",
            holder="test",
            model_folder=MODEL,
            storage=Storage(uri=f"file://{tmp_path}/run"),
        )
    )
    rank.load()
    rank.start_phase(RL | {"profile": {"firstStep": 2, "numSteps": 2}}, 0)
    plain = [rank.policy_step(batch()).loss for _ in range(4)]
    found = sorted((tmp_path / "run" / "profiles" / "rl").iterdir())
    assert [path.name for path in found] == ["step-2-rank-0.json.gz", "step-3-rank-0.json.gz"]
    names = {
        event.get("name")
        for event in json.loads(gzip.decompress(found[0].read_bytes()))["traceEvents"]
    }
    assert {"aten::mm", "aten::_fused_adamw_"} <= names
    assert len(plain) == 4


def test_a_store_that_fails_costs_the_trace_alone(caplog: pytest.LogCaptureFixture) -> None:
    class FullStore(MemoryStore):
        @override
        def put(self, key: str, data: Any) -> None:
            raise StoreError(f"{key}: no space")

    phase = Phase.model_validate(RL | {"profile": {"firstStep": 1}})
    with profile_step(phase, step=1, rank=0, store=FullStore()):
        done = True
    assert done
    assert "step 1 has no trace: profiles/rl/step-1-rank-0.json.gz: no space" in caplog.text


def test_a_step_behind_the_end_of_the_phase_is_refused() -> None:
    with pytest.raises(ValueError, match="the phase ends before it"):
        Phase.model_validate(RL | {"profile": {"firstStep": 6}})
