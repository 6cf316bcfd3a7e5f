"""Arguments of vLLM from a run's engine settings, and the check of those that a user adds."""

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import JsonValue
from transformers import AutoConfig

from etude.common.api.run.context_extension import ContextExtension, extend_rope
from etude.common.api.run.engine_settings import EngineSettings
from etude.common.errors import Problem, UserError
from etude.common.model_sources.mtp_head import ARCHITECTURE

WHERE = "roles.inference.engine.engineArgs"

OWNED = {
    "model": "model.uri",
    "tokenizer": "model.uri",
    "served_model_name": "metadata.name",
    "dtype": "weights.dtype",
    "max_model_len": "roles.inference.maxModelLen",
    "max_num_seqs": "roles.inference.maxConcurrent",
    "max_num_batched_tokens": "roles.inference.engine.maxBatchedTokens",
    "tensor_parallel_size": "roles.inference.engine.tensorParallel",
    "pipeline_parallel_size": "roles.inference.engine.pipelineParallel",
    "data_parallel_size": "roles.inference.engine.dataParallel",
    "enable_expert_parallel": "roles.inference.engine.expertParallel",
    "gpu_memory_utilization": "roles.inference.engine.memoryShare",
    "kv_cache_dtype": "roles.inference.engine.kvCacheDtype",
    "kv_cache_memory_bytes": "roles.inference.kvCacheMib",
    "quantization": "roles.inference.engine.quantization",
    "enable_prefix_caching": "weights.advanced.prefixCache",
    "seed": "",
    "logprobs_mode": "",
    "load_format": "",
    "weight_transfer_config": "",
    "worker_extension_cls": "",
    "worker_cls": "",
    "scheduler_cls": "",
    "logits_processors": "",
    "distributed_executor_backend": "",
    "hf_token": "",
    "disable_log_stats": "",
    "trust_remote_code": "",
    "hf_overrides": "phases[].contextExtension",
    # A draft model's weights of its own would stay behind the policy's.
    "speculative_config": "roles.inference.engine.speculativeTokens",
    "spec_method": "roles.inference.engine.speculativeTokens",
    "spec_model": "",
    "spec_tokens": "roles.inference.engine.speculativeTokens",
}
"""Arguments that users may not give here, with the field that sets them; empty: nothing does."""


def read_settings(settings: EngineSettings) -> dict[str, Any]:
    """Arguments for engines on CPUs and GPUs alike; what is unset is left to vLLM."""
    wanted: dict[str, Any] = {
        "kv_cache_dtype": settings.kv_cache_dtype,
        "quantization": settings.quantization,
    }
    return {name: value for name, value in wanted.items() if value is not None} | dict(
        settings.engine_args
    )


def read_speculation(settings: EngineSettings, model: Path, *, max_requests: int) -> dict[str, Any]:
    """Arguments by which the model's own head guesses tokens.

    Args:
        settings: of the engine.
        model: its folder.
        max_requests: in one batch.

    Raises:
        UserError: it has none.
    """
    if not settings.speculative_tokens:
        return {}
    config = AutoConfig.from_pretrained(model, local_files_only=True)
    # vLLM has drafts of other architectures, whose heads no learner here trains or publishes.
    if ARCHITECTURE not in (config.architectures or ()):
        raise UserError(
            Problem(
                reason="EngineRefused",
                what=f"{config.model_type} has no head of multi-token prediction to guess with",
                where=f"roles.inference.engine.speculativeTokens ({model})",
                fix="set 0, or add a head to a Qwen2 model: etude model add-head",
            )
        )
    # Of vLLM's methods of rejection this alone leaves the distribution as it is.
    return {
        "speculative_config": {
            "method": "mtp",
            "num_speculative_tokens": settings.speculative_tokens,
            "rejection_sample_method": "standard",
            # By the number of requests, a table that the guard changes while the engine runs.
            "num_speculative_tokens_per_batch_size": [
                (1, max_requests, settings.speculative_tokens)
            ],
        }
    }


def read_positions(model: Path, extension: ContextExtension | None) -> dict[str, Any]:
    """Arguments that give a model the positions of an extension.

    Raises:
        ValueError: the model does not allow it.
    """
    if extension is None:
        return {}
    config = AutoConfig.from_pretrained(model, local_files_only=True)
    rope = extend_rope(
        config.rope_parameters or {}, extension, positions=config.max_position_embeddings
    )
    return {
        "hf_overrides": {
            "rope_parameters": rope,
            "max_position_embeddings": extension.positions,
        }
    }


def read_parallelism(settings: EngineSettings, gpus: int) -> dict[str, Any]:
    """Arguments that divide the GPUs of a pod.

    Args:
        settings: whose product of parallelism is the number of GPUs.
        gpus: of the pod, at least one.
    """
    tensor = settings.tensor_parallel or gpus // settings.other_ranks
    wanted: dict[str, Any] = {"tensor_parallel_size": tensor}
    if settings.pipeline_parallel > 1:
        wanted["pipeline_parallel_size"] = settings.pipeline_parallel
    if settings.data_parallel > 1:
        wanted["data_parallel_size"] = settings.data_parallel
    if settings.expert_parallel:
        wanted["enable_expert_parallel"] = True
    if settings.memory_share is not None:
        wanted["gpu_memory_utilization"] = float(settings.memory_share)
    return wanted


def check_arguments(given: Mapping[str, JsonValue], arguments: type[Any]) -> None:
    """Check the names of further arguments against the installed vLLM.

    Args:
        given: by name.
        arguments: vLLM's dataclass of all arguments.

    Raises:
        UserError: one is unknown, or is set elsewhere.
    """
    known = {field.name for field in dataclasses.fields(arguments)}
    for name in given:
        if name in OWNED:
            owner = OWNED[name]
            fix = f"set {owner}" if owner else "remove it"
            raise UserError(_problem(name, "is not set here", fix))
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known - set(OWNED)), n=3)
            fix = f"did you mean {' or '.join(near)}?" if near else "remove it"
            raise UserError(_problem(name, "is no argument of the installed vLLM", fix))


def _problem(name: str, what: str, fix: str) -> Problem:
    return Problem(
        reason="UnknownEngineArgument", what=f"{name} {what}", where=f"{WHERE}.{name}", fix=fix
    )
