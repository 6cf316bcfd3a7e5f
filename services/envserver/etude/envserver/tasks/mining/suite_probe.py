"""Probe of a test suite: runs inside a sandbox, with the grader of tasks as grade.py next to it.

    python3 /tests/probe.py

Reads suite.json next to itself: {"command", "log"}. Runs it in the workspace and writes a report
of JSON under zlib, since sandboxes hand out files up to 64 KiB: {"statuses": {test: status},
"exit_code", "seconds", "errors": {kind of error: lines of the log}, "tail"}.

Standard library only.
"""

import collections
import json
import re
import sys
import time
import zlib
from pathlib import Path

import grade  # type: ignore[import-not-found]  # as the sandbox names swebench_grader.py

REPORT = Path("/logs/report.z")
_ERROR = re.compile(
    r"^\W*(?:E\s+)?(?:[a-z_]+\.)*([A-Z]\w*(?:Error|Exception)\b)|\b(panic)(?:ked at |: )",
    re.MULTILINE,
)
_TAIL = 1_500


def main() -> int:
    """Run the suite and write the report."""
    here = Path(__file__).parent
    given = json.loads((here / "suite.json").read_bytes())
    started_s = time.monotonic()
    exit_code, log = grade.run_command(given["command"], Path("/workspace"), REPORT.parent)
    errors = collections.Counter(match[1] or match[2] for match in _ERROR.finditer(log))
    report = {
        "statuses": grade.statuses(log, given["log"]),
        "exit_code": exit_code,
        "seconds": time.monotonic() - started_s,
        "errors": dict(errors.most_common(5)),
        "tail": log[-_TAIL:],
    }
    REPORT.write_bytes(zlib.compress(json.dumps(report).encode(), 9))
    return 0


if __name__ == "__main__":
    sys.exit(main())
