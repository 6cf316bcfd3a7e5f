"""What a fresh engine says that was started on an exported folder and knows of no version.

python -m tests.harness.chaos.engines.fresh FOLDER PROMPT
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tests.harness.chaos.engines.policy import CONTEXT, sha256
from tests.harness.chaos.engines.process import CONCURRENT, ROOT
from tests.harness.chaos.settings import Settings

from etude.common.weights import VersionId
from etude.common.weights.replicas.mirror import Mirror
from etude.common.weights.tensors.model_folder import write_folder
from etude.inference.engine.interface import SampleRequest
from etude.inference.settings import EngineOptions

TOKENS = 48
SEED = 7
TEMPERATURES = (0.0, 1.0)

Answers = list[list[float]]
"""Token ids and log-probs at each temperature."""


class Export(NamedTuple):
    """A version as a model folder."""

    folder: Path
    sha: str
    """Of its words in checkpoint order."""


def prompt_of(version: VersionId) -> list[int]:
    """One that no other request has brought: its prefix is in no cache."""
    return [300, 301, 302, 10 + version.number % 250, 303, 10 + version.epoch % 250]


def exported(settings: Settings, version: VersionId) -> Export:
    """Read a version anew and write it as a folder.

    Raises:
        EtudeError: it cannot be read.
    """
    mirror = Mirror(settings.raw_store(), settings.folder / "exports" / f"copy-{version}")
    mirror.move_to(version)
    assert mirror.schema is not None
    folder = settings.folder / "exports" / str(version)
    source = settings.folder / "model"
    write_folder(folder, schema=mirror.schema, words=mirror.tensor_words, source=source)
    return Export(folder, sha256(mirror.tensor_words))


def answers(folder: Path, prompt: Sequence[int]) -> Answers:
    """From a process of its own.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    command = [sys.executable, "-m", "tests.harness.chaos.engines.fresh", str(folder)]
    done = subprocess.run(
        [*command, json.dumps([*prompt])], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found: Answers = json.loads(done.stdout.splitlines()[-1])
    return found


async def _answer(folder: Path, prompt: Sequence[int]) -> None:
    options = EngineOptions(
        model=folder,
        served_name="fresh",
        dtype="bfloat16",
        max_model_len=CONTEXT,
        max_concurrent=CONCURRENT,
        kv_cache_bytes=64 << 20,
        gpus=0,
        follows_store=False,
        threads=1,
    )
    os.environ.update(options.environment())
    from etude.inference.engine import replica  # noqa: PLC0415 - vLLM reads the environment

    engine, found = replica.build_replica(options), []
    for temperature in TEMPERATURES:
        request = SampleRequest(
            request_id=f"fresh-{temperature}",
            prompt_token_ids=prompt,
            max_tokens=TOKENS,
            temperature=temperature,
            seed=SEED,
        )
        [piece] = [piece async for piece in engine.generate(request)]
        found += [list(map(float, piece.token_ids)), np.array(piece.logprobs, np.float32).tolist()]
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)  # as every engine's process ends: vLLM's threads wait for nobody


if __name__ == "__main__":
    asyncio.run(_answer(Path(sys.argv[1]), json.loads(sys.argv[2])))
