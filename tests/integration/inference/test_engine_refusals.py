"""What the engine says when vLLM refuses or dies."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from etude.common.errors import UnavailableError, UserError
from etude.common.weights import VersionRef
from etude.inference.engine import replica
from etude.inference.settings import EngineOptions


@pytest.fixture
def options(make_model: Callable[..., Path], tmp_path: Path) -> EngineOptions:
    return EngineOptions(
        model=make_model(tmp_path / "model"),
        served_name="tiny",
        dtype="float32",
        max_model_len=None,
        max_concurrent=1,
        kv_cache_bytes=1 << 20,
        gpus=0,
        follows_store=True,
        threads=1,
    )


def test_a_model_that_vllm_does_not_know_is_the_users_mistake(options: EngineOptions) -> None:
    path = options.model / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"architectures": ["TapeForCausalLM"]}))
    with pytest.raises(UserError, match="TapeForCausalLM") as refusal:
        replica.build_replica(options)
    assert "\n" not in refusal.value.problem.what


class DeadCore:
    """An engine core whose thread has ended."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*_: object, **__: object) -> None:
            raise EngineDeadError

        return call


async def test_a_swap_on_a_dead_engine_says_that_the_engine_is_unavailable(
    options: EngineOptions,
) -> None:
    config = SimpleNamespace(get_vocab_size=lambda: 320, max_model_len=256, is_moe=False)
    core = DeadCore()
    ranks = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))
    llm: Any = SimpleNamespace(
        model_config=config,
        vllm_config=ranks,
        engine_core=core,
        collective_rpc=core.call_utility,
        errored=True,
    )
    engine = replica.Replica(llm, options)
    with pytest.raises(UnavailableError, match="EngineDeadError"):
        await engine.swap.audit()
    same = VersionRef(epoch=1, number=0, manifest_sha256="0" * 64, state=engine.swap.state)
    with pytest.raises(UnavailableError, match="EngineDeadError"):
        await engine.swap.relabel(same)
    assert engine.failed
    assert engine.live is None
