"""python -m tests.harness.golden [STAGE] [--write]: play the golden run; compare or rewrite it."""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.harness.golden.stages import STAGES
from tests.harness.golden.transcript import (
    FILE,
    Row,
    differences,
    left_out,
    paragraphs,
    play,
    written,
)
from tests.harness.golden.tree import TREE


async def played(stage: str) -> list[Row]:
    """The run on one stage."""
    with tempfile.TemporaryDirectory() as folder:
        async with STAGES[stage](Path(folder)) as opened:
            return await play(opened, TREE)


def main() -> int:
    """Play, say what was left out and what is different; 0 if nothing is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", nargs="?", default="process", choices=STAGES)
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}: review the diff")
    options = parser.parse_args()
    rows = asyncio.run(played(options.stage))
    missing = left_out(rows)
    if options.write and missing:
        sys.stdout.write(f"{options.stage} leaves calls out: it cannot write {FILE.name}\n")
        return 1
    if options.write:
        FILE.write_text(written(rows))
    different = list(differences(rows, paragraphs(FILE.read_text())))
    made = f"{len(rows) - len(missing)} of {len(rows)} calls made, {len(different)} different"
    sys.stdout.write("\n".join([*missing, *different, made, ""]))
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
