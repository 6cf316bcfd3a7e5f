"""A million hostile frames, from `python -m tests.harness.fuzz`.

Most of them go to a node's parser and channels in this process, the others to a live node.
bench/out/fuzz.json says what they came to.
"""

import argparse
import asyncio
import json
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.harness.fuzz import agents, channels, live, parsing
from tests.harness.fuzz.counts import Counts
from tests.support.vm.guests import ROOT

OUT = ROOT / "bench" / "out" / "fuzz.json"
_PARSED = 0.5
"""Of all frames; they cost 10 microseconds each, those at a channel 500, those at a node 1,100."""
_LIVE = 0.1


def cpu_s() -> float:
    """CPU time of this process and of those that it has waited for."""
    whose = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return sum(sum(resource.getrusage(each)[:2]) for each in whose)


def row(counts: Counts, used_s: float, more: dict[str, int] | None = None) -> dict[str, object]:
    """What one part of the run came to."""
    return {
        "frames": counts.frames,
        "refused": counts.refused,
        "crashes": counts.crashes,
        "hangs": counts.hangs,
        "cpu_s": round(used_s, 1),
        **(more or {}),
    }


def besieged(seed: int, num_frames: int) -> tuple[Counts, dict[str, int]]:
    """A live node; what its clients were told, too."""
    with tempfile.TemporaryDirectory() as folder:
        siege = asyncio.run(live.besieged(Path(folder), seed, num_frames))
    return siege.counts, dict(sorted(siege.answers.items()))


def main() -> int:
    """All parts; 0 if nothing crashed and nothing hung."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    parsed, at_node = round(asked.frames * _PARSED), round(asked.frames * _LIVE)
    parts: dict[str, Callable[[], tuple[Counts, dict[str, int]]]] = {
        "parser": lambda: (parsing.run(asked.seed, parsed), {}),
        "channel": lambda: (channels.run(asked.seed, asked.frames - parsed - at_node), {}),
        "node": lambda: besieged(asked.seed, at_node),
        "agent": lambda: (asyncio.run(agents.run(asked.seed, at_node)), {}),
    }
    total, rows = Counts(), {}
    for name, part in parts.items():
        sys.stdout.write(f"{name}, seed {asked.seed}: ")
        sys.stdout.flush()
        began_s = cpu_s()
        counts, more = part()
        rows[name] = row(counts, cpu_s() - began_s, more)
        total += counts
        sys.stdout.write("\n".join([json.dumps(rows[name]), *counts.findings, ""]))
    said = {"seed": asked.seed, **row(total, cpu_s()), "parts": rows}
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(said, indent=1) + "\n")
    return bool(total.crashes or total.hangs)


if __name__ == "__main__":
    sys.exit(main())
