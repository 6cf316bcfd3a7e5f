"""Serves one Hugging Face folder to OpenAI clients: `python -m etude.inference.serve_command`."""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from etude.common.errors import EtudeError, UserError
from etude.common.process import shutdown_signals
from etude.inference.engine.build import build_engine, exit_process
from etude.inference.serving.openai import HttpServer, PolicyVersionMiddleware
from etude.inference.settings import (
    DEFAULT_KV_CACHE_MIB,
    EngineOptions,
    read_folder,
    require_weights,
)

INVALID = 4
"""Exit code of the command line for bad input, as in `etude`; 78 is for roles."""
STOP_GRACE_S = 5.0
"""Grace time for running responses."""


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="etude serve", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face model folder")
    parser.add_argument("--name", help="model name for clients; the folder's name unless set")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=_port, default=8000, help="0 picks a free port")
    parser.add_argument("--max-model-len", type=int, help="longest prompt plus completion")
    parser.add_argument("--max-concurrent", type=int, default=16, help="requests at once")
    parser.add_argument(
        "--kv-cache-mib", type=int, default=DEFAULT_KV_CACHE_MIB, help="memory of the KV cache"
    )
    parser.add_argument("--gpus", type=int, default=0, help="0 serves on the CPU")
    return parser.parse_args(words)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a valid port: use a number from 0 to 65535"
        )
    return int(text)


def options(args: argparse.Namespace) -> EngineOptions:
    """The engine that the command line asks for.

    Raises:
        UserError: the folder holds no model, or a model without weights.
    """
    facts = read_folder(args.model)
    require_weights(args.model)
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return EngineOptions(
        model=args.model,
        served_name=args.name or args.model.resolve().name,
        dtype=facts.dtype,
        max_model_len=args.max_model_len,
        max_concurrent=args.max_concurrent,
        kv_cache_bytes=args.kv_cache_mib << 20,
        gpus=args.gpus,
        follows_store=False,
        threads=int(threads) if threads.isdecimal() else len(os.sched_getaffinity(0)),
    )


async def serve(args: argparse.Namespace) -> None:
    """Build the engine from the folder's own weights, then serve until SIGTERM."""
    chosen = options(args)
    stop = asyncio.Event()
    with shutdown_signals(stop):
        replica = await build_engine(chosen, stop)
        if replica is None:
            exit_process()
        from etude.inference.serving.openai_app import build_openai_app  # noqa: PLC0415 - vLLM is heavy

        http = HttpServer(
            PolicyVersionMiddleware(await build_openai_app(replica), lambda: ""),
            args.host,
            args.port,
        )
        await http.start()
        sys.stdout.write(f"serving {chosen.served_name} at http://{args.host}:{http.port}/v1\n")
        sys.stdout.flush()
        await stop.wait()
        await http.stop(STOP_GRACE_S)
        replica.shutdown()
        exit_process()


def main() -> None:
    """Serve one folder until SIGTERM."""
    args = parse(sys.argv[1:])
    try:
        asyncio.run(serve(args))
    except UserError as error:
        sys.stderr.write(f"etude serve: {error}\n")
        sys.exit(INVALID)
    except (EtudeError, OSError, RuntimeError) as error:
        sys.stderr.write(f"etude serve: {error}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
