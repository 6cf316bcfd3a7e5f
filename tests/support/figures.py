"""What suites measured, merged into bench/out, where every figure of the project lies.

python -m tests.support.figures NAME KEY … prints what was recorded under a name, and fails if one
of these keys was not.
"""

import fcntl
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

OUT = Path(__file__).parents[2] / "bench" / "out"

Figure = int | float | str | list[str] | dict[str, int]


def record(name: str, folder: Path = OUT, /, **figures: Figure) -> Path:
    """Merge figures into `<name>.json`; what others wrote there stays. Returns the file.

    Safe beside other processes that record at the same time: a reader never sees half a file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    with (folder / f".{name}.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(known | figures, indent=2) + "\n", encoding="utf-8")
        partial.replace(path)
    return path


def absent(name: str, keys: Sequence[str], *, folder: Path = OUT) -> list[str]:
    """Which of these figures nobody has recorded."""
    path = folder / f"{name}.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return [key for key in keys if key not in known]


if __name__ == "__main__":
    asked, wanted = sys.argv[1], sys.argv[2:]
    found = OUT / f"{asked}.json"
    print(found.read_text(encoding="utf-8") if found.exists() else "{}")  # noqa: T201
    lacking = absent(asked, wanted)
    if lacking:
        sys.exit(f"{found} says nothing of {', '.join(lacking)}")
