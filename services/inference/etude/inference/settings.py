"""Settings of the inference role from its environment, and the options of its engine."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Self

from etude.common import stores
from etude.common.api.run.context_extension import ContextExtension
from etude.common.api.run.engine_settings import EngineSettings
from etude.common.api.run.phases import inherit_context
from etude.common.demand import WINDOW_S
from etude.common.errors import InvalidFieldError, Problem, UserError
from etude.common.release.channels import channel_key
from etude.common.role_inputs import ResolvedRun

PrefixCache = Literal["Salted", "Sticky", "Reset"]
"""Modes of sharing cached prefixes; see engine.prefix_cache."""

DTYPES = {"Float32": "float32", "BFloat16": "bfloat16"}
DEFAULT_KV_CACHE_MIB = 1_024
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
"""Files that vLLM looks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Addresses and files of one replica."""

    run_file: Path
    host: str = "127.0.0.1"
    port: int = 7010
    http_port: int = 7011
    """OpenAI-compatible endpoint."""
    probe_port: int = 8080
    pod: str = "inference-0"
    channel: str = ""
    """Channel that decides which version is served; without one it is the run's newest."""
    lending_window_s: int = round(WINDOW_S)
    """Time for which a turn of a user counts as demand, where the engine of a channel is lent."""
    lending_run: str = ""
    """Name of the run that the engine of a channel is lent to; empty if it never is."""
    scratch: Path
    traces_file: Path | None = None
    threads: int
    """CPU threads of the engine."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """The settings of this process.

        Raises:
            UserError: one is missing or not a number.
        """
        traces = env.get("ETUDE_TRACES_FILE")
        return cls(
            run_file=Path(_required(env, "ETUDE_RUN_FILE")),
            host=env.get("ETUDE_HOST", "127.0.0.1"),
            port=_port(env, "ETUDE_PORT", 7010),
            http_port=_port(env, "ETUDE_HTTP_PORT", 7011),
            probe_port=_port(env, "ETUDE_PROBE_PORT", 8080),
            pod=env.get("ETUDE_POD", "inference-0"),
            channel=_channel(env),
            lending_window_s=_integer(
                env, "ETUDE_LENDING_WINDOW_S", round(WINDOW_S), low=1, high=86_400
            ),
            lending_run=env.get("ETUDE_LENDING_RUN", ""),
            scratch=Path(_required(env, "ETUDE_SCRATCH")),
            traces_file=Path(traces) if traces else None,
            threads=_integer(env, "OMP_NUM_THREADS", len(os.sched_getaffinity(0)), low=1),
        )


def _required(env: Mapping[str, str], name: str) -> str:
    if not env.get(name):
        raise UserError(_problem(name, "is not set", "the operator and `etude run` set it"))
    return env[name]


def _channel(env: Mapping[str, str]) -> str:
    name = env.get("ETUDE_CHANNEL", "")
    if name:
        try:
            channel_key(name, 1)
        except InvalidFieldError as cause:
            fix = "name a channel of the run's store, such as stable or canary"
            raise UserError(_problem("ETUDE_CHANNEL", cause.what, fix)) from cause
    return name


def _port(env: Mapping[str, str], name: str, default: int) -> int:
    return _integer(env, name, default, low=0, high=65_535)


def _integer(
    env: Mapping[str, str], name: str, default: int, *, low: int, high: int = 4_096
) -> int:
    text = env.get(name, str(default))
    if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
        raise UserError(_problem(name, f"is {text!r}", f"use a number from {low} to {high}"))
    return int(text)


def _problem(where: str, what: str, fix: str) -> Problem:
    return Problem(reason="InvalidSettings", what=what, where=where, fix=fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options that an engine is built from."""

    model: Path
    """Hugging Face folder."""
    served_name: str
    """Model name on the OpenAI-compatible endpoint."""
    dtype: str
    """float32, bfloat16, or auto for the folder's own."""
    max_model_len: int | None
    """Longest prompt plus completion, in tokens; the model's own limit unless set."""
    max_concurrent: int
    kv_cache_bytes: int
    """On CPU; a GPU engine takes all free memory."""
    gpus: int
    follows_store: bool
    """True: weights come as policy versions. False: the folder's own weights are served."""
    threads: int
    pause: Literal["InFlight", "Drain", "Abort"] = "InFlight"
    """Effect of a swap on running requests: they continue, end first, or are aborted."""
    drain_s: float = 600.0
    """Longest wait for running requests in mode Drain, before a version is postponed."""
    may_load: bool = True
    """True if a changed tensor may be loaded when it cannot be written in place."""
    recompute_kv: bool = False
    """True if running requests recompute their KV cache at a swap."""
    prefix_cache: PrefixCache = "Salted"
    """Requests that share cached prefixes: of one version, of one rollout, or all since a swap."""
    audit_every: int = 50
    """Versions between two full scans of the live weights."""
    sticky_lag: int = 4
    """Versions after which a rollout's cached prefixes are dropped."""
    undo_depth: int = 1
    """Versions that can be undone without reading the store."""
    engine: EngineSettings = field(default_factory=EngineSettings)
    """Parallelism, memory and further arguments."""
    context_extension: ContextExtension | None = None
    """Positions beyond those of the folder."""

    def environment(self) -> dict[str, str]:
        """Environment variables that vLLM and OpenMP need before they are imported."""
        return {
            # One process: a second one would import everything again (13 CPU-s, 0.9 GB).
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if self.gpus == 0 else "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ZENTORCH_WEIGHT_PREPACK": "0",
            # vLLM compiles a comparison of the sampler even when told to run eagerly: a C++
            # compiler would have to be in every image, for nothing.
            "TORCH_COMPILE_DISABLE": "1" if self.gpus == 0 else "0",
            "OMP_NUM_THREADS": str(self.threads),
            # A team of threads that spins while it waits took 2 to 8 times the CPU on busy cores.
            "OMP_WAIT_POLICY": "passive",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }


def engine_options(run: ResolvedRun, *, scratch: Path, threads: int) -> EngineOptions:
    """Engine options of a run's inference role; refuses those that cannot start.

    Raises:
        UserError: the run has no inference role, or its model folder cannot be served.
    """
    role = run.spec.roles.inference
    if role is None:
        raise UserError(_problem("roles.inference", "is not set", "add it to the RLRun"))
    model = stores.local_folder(run.spec.model.folder, scratch, run.spec.storage)
    extension = inherit_context(run.spec.phases)[-1].context_extension
    limit = read_folder(model).position_limit if extension is None else extension.positions
    if limit is not None and role.max_model_len > limit:
        raise UserError(
            _problem(
                "roles.inference.maxModelLen",
                f"is {role.max_model_len}, but the model has positions for {limit}",
                f"set it to at most {limit}",
            )
        )
    return EngineOptions(
        model=model,
        served_name=run.name,
        dtype=DTYPES[run.spec.weights.dtype],
        max_model_len=role.max_model_len,
        max_concurrent=role.max_concurrent,
        kv_cache_bytes=(role.kv_cache_mib or DEFAULT_KV_CACHE_MIB) << 20,
        gpus=role.gpus_per_replica,
        follows_store=True,
        threads=threads,
        pause=run.spec.weights.pause,
        drain_s=run.spec.weights.timeout_seconds,
        may_load=run.spec.weights.encoding != "Delta",
        recompute_kv=run.spec.weights.advanced.recompute_kv,
        prefix_cache=run.spec.weights.advanced.prefix_cache,
        sticky_lag=run.spec.weights.advanced.sticky_lag,
        audit_every=run.spec.weights.advanced.audit_every,
        undo_depth=run.spec.weights.advanced.undo_depth,
        engine=role.engine,
        context_extension=extension,
    )


class ModelFolderFacts(NamedTuple):
    """Serving limits from a model folder's config.json."""

    position_limit: int | None
    """Longest prompt plus completion that the model has positions for."""
    dtype: str
    """Number format of its weights; auto if it is not given."""


def read_folder(model: Path) -> ModelFolderFacts:
    """The facts of a Hugging Face folder.

    Raises:
        UserError: the folder has no readable config.json, or no tokenizer.
    """
    try:
        config = json.loads((model / "config.json").read_bytes())
        limit, dtype = config.get("max_position_embeddings"), config.get("dtype")
        dtype = dtype or config.get("torch_dtype")
    except (OSError, ValueError, AttributeError) as cause:
        raise UserError(
            _problem(
                f"{model}/config.json",
                f"cannot be read: {cause}",
                "name a Hugging Face model folder",
            )
        ) from cause
    if not (model / "tokenizer.json").exists():
        raise UserError(
            _problem(
                f"{model}/tokenizer.json",
                "is missing",
                "save the tokenizer into the model folder",
            )
        )
    return ModelFolderFacts(
        position_limit=limit if type(limit) is int else None,
        # vLLM's own "auto" turns float32 weights into bfloat16.
        dtype=dtype if dtype in {"float32", "float16", "bfloat16"} else "auto",
    )


def require_weights(model: Path) -> None:
    """Check for weights before vLLM does: it takes a minute, and its error says less.

    Raises:
        UserError: the folder holds none in a format that vLLM reads.
    """
    if not any(file for pattern in WEIGHTS for file in model.glob(pattern)):
        raise UserError(
            _problem(
                str(model),
                f"holds no weights ({', '.join(WEIGHTS)})",
                "name a folder with weights, such as a run folder with a checkpoint",
            )
        )
