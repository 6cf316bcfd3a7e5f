"""Ranks in processes of their own, forked from one that has imported torch.

The import is most of what a short program of ranks costs; a process of tests pays for it once.
"""

import contextlib
import multiprocessing
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

ROOT = str(Path(__file__).parents[3])
LIMIT_S = 500.0
"""Of a program, on a busy machine."""
PRELOADED = [
    "torch.distributed.tensor.debug",
    "transformers.models.llama.modeling_llama",
    "etude.trainer.learner.learner",
]


def run_ranks(program: Callable[..., Any], *arguments: object, size: int) -> Any:
    """Run a program on ranks that may talk to each other.

    Args:
        program: a function of an importable module; gets the rank, then the arguments.
        arguments: of the program.
        size: number of ranks.

    Returns:
        What it returns on rank 0.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    result, sender = context.Pipe(duplex=False)
    ranks = [
        context.Process(target=_run_rank, args=(rank, sender, program, arguments), daemon=True)
        for rank in range(size)
    ]
    sys.path.append(ROOT)  # ranks import the program's module by its name
    for each in ranks:
        each.start()
    sys.path.pop()
    sender.close()
    found = None
    # A rank that fails closes its end without an answer; its error is on the standard error.
    with contextlib.suppress(EOFError):
        found = result.recv() if result.poll(LIMIT_S) else None
    for each in ranks:
        each.join(LIMIT_S)
    assert [each.exitcode for each in ranks] == [0] * size
    return found


def _run_rank(
    rank: int, sender: Connection, program: Callable[..., Any], arguments: tuple[object, ...]
) -> None:
    torch.set_num_threads(1)
    found = program(rank, *arguments)
    if rank == 0:
        sender.send(found)
    sender.close()
