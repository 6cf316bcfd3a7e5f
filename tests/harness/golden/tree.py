"""The files that the golden run begins with: odd encodings, odd line ends, long and many."""

from collections.abc import Iterator

from etude.envserver.storage.trees import File

_CORE = b'''"""What things cost."""


def total(prices):
    result = 0
    for price in prices:
        result = result - price
    return result


def discount(price, percent):
    return price - price * percent / 100


def mean(prices):
    return total(prices) / len(prices)
'''
_CLI = b"""import os
import sys


def main():
    print(undefined_before)
"""


def _made() -> Iterator[tuple[str, bytes]]:
    yield "README.md", "# Shop\n\nSells *things*: 1 € each, ☃ on request.\n".encode()
    yield "shop/__init__.py", b""
    yield "shop/core.py", _CORE
    yield "shop/cli.py", _CLI
    yield "shop/windows.py", _CORE.replace(b"\n", b"\r\n")
    yield "shop/bom.py", b"\xef\xbb\xbfVALUE = 1\n"
    yield "shop/münze.py", "MÜNZE = '€'\n".encode()
    yield (
        "tests/test_core.py",
        b"from shop.core import total\n\n\ndef test_total():\n    assert total([1, 2]) == 3\n",
    )
    yield "data/long.txt", b"".join(b"line %d of the long file\n" % n for n in range(1, 5001))
    yield "data/wide.txt", "ab€".encode() * 30_000
    yield "data/rows.csv", b"".join(b"%d,%d,needle\n" % (n, n * n) for n in range(300))
    yield "data/binary.bin", bytes(range(256)) * 4
    yield "data/latin1.txt", b"caf\xe9 and na\xefve\nneedle \xff\n"
    yield "data/mixed.txt", b"one\r\ntwo\nthree\r\n"
    yield "data/no_end.txt", b"first\nlast without an end"
    yield "data/empty.txt", b""
    yield ".hidden/secret.py", b"needle = 'hidden'\n"
    yield ".env", b"KEY=needle\n"
    yield "deep/a/b/c/d/e.txt", b"deep needle\n"
    for n in range(250):
        yield f"many/f{n:03}.txt", b"file %d\nneedle %d\n" % (n, n % 7)
    yield "shell/words.txt", b"zebra\napple\nmango\n"


TREE = {path: File(data) for path, data in _made()} | {
    "shell/run.sh": File(b"#!/bin/sh\necho ran with $# arguments\n", executable=True)
}
"""What commands write stays below shell/, so that where there are none, the rest is the same."""
