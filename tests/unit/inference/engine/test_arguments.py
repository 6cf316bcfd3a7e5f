"""Engine settings become vLLM's arguments, and unknown ones are refused by name."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tests.support.trainer.mtp_folder import write_mtp_config
from transformers import LlamaConfig

from etude.common.api.run.context_extension import ContextExtension
from etude.common.api.run.engine_settings import EngineSettings
from etude.common.api.run.roles import InferenceRole
from etude.common.errors import UserError
from etude.inference.engine.arguments import (
    check_arguments,
    read_parallelism,
    read_positions,
    read_settings,
    read_speculation,
)


def settings(**fields: object) -> EngineSettings:
    return EngineSettings.model_validate(fields)


def test_without_settings_all_gpus_share_every_layer() -> None:
    assert read_parallelism(settings(), 4) == {"tensor_parallel_size": 4}
    assert read_settings(settings()) == {}


def test_each_setting_reaches_vllm_under_its_name() -> None:
    given = settings(
        pipelineParallel=2,
        dataParallel=2,
        expertParallel=True,
        memoryShare="0.85",
        kvCacheDtype="fp8",
        quantization="fp8",
        engineArgs={"swap_space": 4},
    )
    assert read_parallelism(given, 8) | read_settings(given) == {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
        "gpu_memory_utilization": 0.85,
        "kv_cache_dtype": "fp8",
        "quantization": "fp8",
        "swap_space": 4,
    }


@pytest.mark.parametrize(
    ("gpus", "engine", "is_valid"),
    [
        (8, {"tensorParallel": 4}, False),
        (8, {"tensorParallel": 4, "dataParallel": 2}, True),
        (8, {"pipelineParallel": 2}, True),
        (8, {"pipelineParallel": 3}, False),
        (0, {"tensorParallel": 2}, False),
        (0, {}, True),
        (0, {"memoryShare": "0.5"}, False),
    ],
)
def test_gpus_that_no_rank_uses_are_refused(
    gpus: int, engine: dict[str, object], *, is_valid: bool
) -> None:
    role = {"gpusPerReplica": gpus, "engine": engine}
    if is_valid:
        InferenceRole.model_validate(role)
        return
    with pytest.raises(ValueError, match=r"gpusPerReplica must be|memoryShare is of GPU"):
        InferenceRole.model_validate(role)


def test_evaluations_leave_an_engine_to_training() -> None:
    InferenceRole.model_validate({"replicas": 2, "evaluationReplicas": 1})
    with pytest.raises(ValueError, match="one engine is for training"):
        InferenceRole.model_validate({"replicas": 2, "evaluationReplicas": 2})


@dataclasses.dataclass
class Arguments:
    """A few of an engine's arguments."""

    max_num_seqs: int = 1
    scheduling_policy: str = "fcfs"


def test_an_unknown_argument_is_refused_with_the_nearest() -> None:
    check_arguments({"scheduling_policy": "priority"}, Arguments)
    with pytest.raises(UserError, match="did you mean scheduling_policy") as caught:
        check_arguments({"schedulling_policy": "priority"}, Arguments)
    assert caught.value.problem.where.endswith("engineArgs.schedulling_policy")


def test_an_argument_that_a_field_sets_is_refused_with_the_field() -> None:
    with pytest.raises(UserError, match=r"maxConcurrent"):
        check_arguments({"max_num_seqs": 9}, Arguments)


def test_drafts_that_no_version_updates_are_refused() -> None:
    with pytest.raises(UserError, match=r"(?s)speculative_config is not set.*speculativeTokens"):
        check_arguments({"speculative_config": {"method": "ngram"}}, Arguments)
    with pytest.raises(UserError, match=r"(?s)spec_model is not set here.*remove it"):
        check_arguments({"spec_model": "a-draft"}, Arguments)


def test_the_policys_own_head_guesses_and_rejection_keeps_its_distribution(tmp_path: Path) -> None:
    write_mtp_config(tmp_path)
    found = read_speculation(settings(speculativeTokens=1), tmp_path, max_requests=8)
    assert found["speculative_config"] == {
        "method": "mtp",
        "num_speculative_tokens": 1,
        "rejection_sample_method": "standard",
        "num_speculative_tokens_per_batch_size": [(1, 8, 1)],
    }
    assert read_speculation(settings(), tmp_path, max_requests=8) == {}


def test_a_model_without_a_head_cannot_guess(tmp_path: Path) -> None:
    LlamaConfig().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"(?s)llama has no head.*etude model add-head"):
        read_speculation(settings(speculativeTokens=1), tmp_path, max_requests=8)


def test_an_engine_has_the_positions_that_the_run_trains(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 500_000.0}
    LlamaConfig(max_position_embeddings=64, rope_parameters=rope).save_pretrained(tmp_path)

    def positions(**fields: Any) -> dict[str, Any]:
        return read_positions(tmp_path, ContextExtension.model_validate(fields))

    assert read_positions(tmp_path, None) == {}
    yarn = {"factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 500_000.0}
    assert positions(positions=256) == {
        "hf_overrides": {
            "rope_parameters": {"rope_type": "yarn", **yarn},
            "max_position_embeddings": 256,
        }
    }
    theta = positions(positions=128, ropeScaling="None", ropeTheta=8_000_000)["hf_overrides"]
    assert theta["rope_parameters"] == {"rope_type": "default", "rope_theta": 8e6}
    with pytest.raises(ValueError, match="has 64 positions already"):
        positions(positions=32)
