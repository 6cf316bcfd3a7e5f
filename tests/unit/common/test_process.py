"""A process that is told to end while it starts ends, also as the first of a container."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

PROGRAM = """
import time
from etude.common.process import end_at_once_when_told

end_at_once_when_told()
print("starts", flush=True)
while True:
    time.sleep(0.05)  # a signal just before a sleep is seen after it
"""
FIRST = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("before", [(), FIRST], ids=["on a machine", "in a container"])
def test_it_ends_at_once_with_the_code_of_the_signal(before: Sequence[str]) -> None:
    words = (*before, sys.executable, "-c", PROGRAM)
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    started = process.stdout.readline()
    if before and not started:
        _, why = process.communicate(timeout=60)
        pytest.skip(f"no namespaces here: {why.strip()}")
    (told,) = children_of(process.pid) if before else [process.pid]
    os.kill(told, signal.SIGTERM)
    assert process.wait(timeout=30) == 128 + signal.SIGTERM
