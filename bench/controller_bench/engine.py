"""A real engine with a small random model, in a process of its own.

python bench/controller_bench/engine.py FOLDER prints its port once it serves.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig

from etude.common.rpc.server import Server
from etude.common.weights import VersionId
from etude.inference.service import SERVICES, InferenceServicer
from etude.inference.settings import EngineOptions
from etude.v1 import inference_pb2_grpc

VOCABULARY, CONTEXT, MOST = 256, 1_024, 128
"""Size of the model, its longest prompt, and the requests that run at once."""


def write_model(folder: Path) -> None:
    """A random model of bytes, a megabyte in size."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    alphabet = {byte: i for i, byte in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.save(str(folder / "tokenizer.json"))


@contextlib.contextmanager
def serve_engine(folder: Path) -> Iterator[str]:
    """Serve the model in a folder; gives host:port.

    Raises:
        RuntimeError: the engine ended before it served.
    """
    write_model(folder)
    process = subprocess.Popen(
        [sys.executable, __file__, str(folder)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        for line in process.stdout:
            if line.startswith("port "):
                yield f"127.0.0.1:{int(line.split()[1])}"
                return
        raise RuntimeError("the engine ended before it served")
    finally:
        process.kill()
        process.wait()


async def _serve(folder: Path) -> None:
    options = EngineOptions(
        model=folder,
        served_name="bench",
        dtype="float32",
        max_model_len=CONTEXT,
        max_concurrent=MOST,
        kv_cache_bytes=256 << 20,
        gpus=0,
        follows_store=False,
        threads=1,
    )
    os.environ.update(options.environment())
    # vLLM reads its environment when it is imported.
    from etude.inference.engine import replica  # noqa: PLC0415

    engine = replica.build_replica(options)
    await engine.relabel(VersionId(1, 0), drop_cache=False)
    server = Server(SERVICES)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(
        InferenceServicer(engine=engine, http_port=0), server.grpc_server
    )
    await server.start()
    sys.stdout.write(f"port {server.port}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
