r"""Parser process: reads files on its standard input, and answers with line ranges.

    python -I -m etude.agent.search.parsing.worker

It prints `ready` first. A request is `{grammar} {bytes}\n` and the bytes; its answer is a line of
`{start}:{end}` for each range, or `-` if the file takes more than the parser's budget. The budget
counts the parser's own steps, so that a busy machine cuts a file like an idle one; time and memory
are bounded as well, and the caller takes a crash for `-`. It runs in the linter's jail.
"""

import functools
import importlib
import resource
import sys
from typing import BinaryIO

from tree_sitter import Language, Parser

from etude.agent.jail import process
from etude.agent.search.parsing import line_ranges
from etude.agent.search.parsing.grammars import GRAMMARS, READY

STEPS, STEPS_PER_KIB = 1_000, 20
"""Calls of the parser's progress callback, one per 100 operations; code takes 5 per KiB. Text that
no grammar expects takes more, and each then costs more the longer the file is."""
MEMORY_BYTES = 1 << 30
CPU_S = 60
_BLOCK_BYTES = 1 << 16


@functools.cache
def _parser(name: str) -> Parser:
    grammar = GRAMMARS[name]
    return Parser(Language(getattr(importlib.import_module(grammar.module), grammar.function)()))


def cut_file(name: str, data: bytes) -> list[line_ranges.LineRange] | None:
    """Line ranges of one file, or None if parsing takes too many steps."""
    steps, most = 0, STEPS + STEPS_PER_KIB * len(data) // 1024

    def is_too_much(_offset: int, _has_error: bool) -> bool:  # noqa: FBT001 - the parser's order
        nonlocal steps
        steps += 1
        return steps > most

    def block(offset: int, _point: object) -> bytes:
        return data[offset : offset + _BLOCK_BYTES]

    try:
        tree = _parser(name).parse(block, progress_callback=is_too_much)
    except ValueError:
        _parser(name).reset()
        return None
    num_lines = data.count(b"\n") + (not data.endswith(b"\n"))
    return line_ranges.cut_tree(tree.root_node, num_lines)


def main(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the input ends."""
    answers.write(READY)
    while header := requests.readline():
        name, _, size = header.decode().partition(" ")
        found = cut_file(name, requests.read(int(size)))
        row = "-" if found is None else " ".join(f"{s.start}:{s.end}" for s in found)
        answers.write(row.encode() + b"\n")
        answers.flush()


def confine() -> None:
    """Load all grammars, then give up everything but the open streams."""
    for name in GRAMMARS:
        _parser(name)
    with open(__file__, "rb") as own:  # noqa: PTH123 - a descriptor of the one file that stays open
        process.confine(own.fileno())
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))


if __name__ == "__main__":
    confine()
    main(sys.stdin.buffer, sys.stdout.buffer)
