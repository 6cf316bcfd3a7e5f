"""A real engine with a context extension samples as the learner computes at these positions."""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from etude.common.api.run.context_extension import ContextExtension
from etude.trainer.model.policy import load_policy
from etude.trainer.model.positions import set_positions

CONTEXT = 32
EXTENSION = {"positions": 256}
TOLERANCE = 1e-4
ENGINE = """
import asyncio, json, os, sys
from pathlib import Path
from etude.common.api.run.context_extension import ContextExtension
from etude.inference.engine.interface import SampleRequest
from etude.inference.settings import EngineOptions
options = EngineOptions(model=Path(sys.argv[1]), served_name="tiny", dtype="float32",
    max_model_len=256, max_concurrent=4, kv_cache_bytes=64 << 20, gpus=0, follows_store=False,
    threads=1, context_extension=ContextExtension.model_validate_json(sys.argv[3]))
os.environ.update(options.environment())
from etude.inference.engine import replica
async def main():
    engine = replica.build_replica(options)
    request = SampleRequest(request_id="long", prompt_token_ids=json.loads(sys.argv[2]),
        max_tokens=60, temperature=0.0)
    pieces = [piece async for piece in engine.generate(request)]
    print(json.dumps([[i for p in pieces for i in p.token_ids],
        [v for p in pieces for v in p.logprobs]]), flush=True)
    os._exit(0)
asyncio.run(main())
"""


@pytest.mark.long
def test_an_engine_samples_beyond_the_positions_of_the_folder_as_the_learner_computes(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "model", max_position_embeddings=CONTEXT)
    policy = load_policy(folder, seed=3)
    policy.model.save_pretrained(folder)
    prompt = [(7 * place + 20) % 300 for place in range(4 * CONTEXT)]
    found = subprocess.run(
        [sys.executable, "-c", ENGINE, str(folder), json.dumps(prompt), json.dumps(EXTENSION)],
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    tokens, logprobs = json.loads(found.stdout.splitlines()[-1])
    assert tokens
    ids = torch.tensor([prompt + tokens])
    places = torch.arange(len(prompt), ids.shape[1])

    def score() -> torch.Tensor:
        with torch.no_grad():
            scores: torch.Tensor = policy(ids, torch.zeros_like(places), places).logprobs
        return scores

    unscaled = score()
    source = copy.deepcopy(policy.config)
    set_positions(policy.model, source, ContextExtension.model_validate(EXTENSION))
    assert float((score() - torch.tensor(logprobs)).abs().max()) < TOLERANCE
    assert float((unscaled - torch.tensor(logprobs)).abs().max()) > 100 * TOLERANCE
