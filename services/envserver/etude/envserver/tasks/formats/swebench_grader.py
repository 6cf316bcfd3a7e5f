"""The verifier of an imported SWE-bench row: copied into tests/, run inside the sandbox.

    python3 /tests/grade.py [WORKSPACE [REWARD_FILE]]

Reads expected.json next to itself: {"fail_to_pass", "pass_to_pass", "deleted", "command", "log"}.
The log has pytest's form, or one of log_forms.py, which then lies next to it too. Puts the
files below files/ into the workspace, runs the command, reads the test runner's log. The reward is
1 if every test that had to be repaired passes and no other that passed before fails, else 0;
without a sign that any test ran there is none.

Covered: the agent's versions of the changed test files are replaced; a log that reports no failure
though the runner failed counts as 0. Not covered: the agent's code runs in the process that prints
the log, so a conftest.py or a plugin of its own can print results of its own.

Standard library only.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

PYTEST = "pytest"
"""Form of the log unless the task names another."""
STATUSES = ("FAILED", "PASSED", "SKIPPED", "ERROR", "XFAIL", "XPASS")
MAX_LOG_BYTES = 64 << 20
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_CONTROL = dict.fromkeys(range(32))
_PROGRESS = re.compile(r"\s+\[\s*\d+%\]$")
_SKIPPED = re.compile(r"\[\d+\]\s")


def statuses(log: str, form: str = PYTEST) -> dict[str, str]:
    """Status of each test; pytest's from its summary (-rA) or its lines (-v), the last counts."""
    if form != PYTEST:
        import log_forms  # type: ignore[import-not-found]  # noqa: PLC0415 - beside this, if needed

        return dict(log_forms.READERS[form](log))
    found = {}
    for line in log.split("\n"):
        text = _COLOURS.sub("", line).translate(_CONTROL).rstrip()
        first, _, rest = text.partition(" ")
        if first in STATUSES:
            name = rest.strip() if first == "PASSED" else _without_reason(rest.strip())
            if name and not (first == "SKIPPED" and _SKIPPED.match(f"{name} ")):
                found[name] = first
            continue
        name, _, last = _PROGRESS.sub("", text).rpartition(" ")
        if last in STATUSES and name.strip():
            found[name.strip()] = last
    return found


def _without_reason(text: str) -> str:
    """The test's name: what follows " - " is why, unless it stands between brackets."""
    at = text.find(" - ")
    while at >= 0 and text[:at].count("[") > text[:at].count("]"):
        at = text.find(" - ", at + 1)
    return text if at < 0 else text[:at]


def status(test: str, found: Mapping[str, str]) -> str:
    """Status of a test; empty if it is not in the log.

    Published lists cut some names within their parameters. Such a name stands for every test that
    begins with it, if all of them passed or none did.
    """
    if test in found or test.count("[") <= test.count("]"):
        return found.get(test, "")
    same = [found[name] for name in found if name.startswith(test)]
    return same[0] if len({each in {"PASSED", "XFAIL"} for each in same}) == 1 else ""


def is_solved(
    found: Mapping[str, str],
    *,
    fail_to_pass: Iterable[str],
    pass_to_pass: Iterable[str],
    exit_code: int,
) -> bool:
    """True if every test that counts passed. A test that passed before may be skipped now."""
    if exit_code and not {"FAILED", "ERROR"} & {*found.values()}:
        return False
    return all(status(test, found) in {"PASSED", "XFAIL"} for test in fail_to_pass) and all(
        status(test, found) in {"PASSED", "XFAIL", "SKIPPED"} for test in pass_to_pass
    )


def main(arguments: list[str]) -> int:
    """Grade, write the reward, and show the end of the log."""
    workspace = Path(arguments[0] if arguments else "/workspace")
    reward = Path(arguments[1] if len(arguments) > 1 else "/logs/verifier/reward.txt")
    here = Path(__file__).parent
    expected = json.loads((here / "expected.json").read_bytes())
    _write_files(here / "files", workspace, expected["deleted"])
    exit_code, log = run_command(expected["command"], workspace, reward.parent)
    sys.stdout.write(log[-8_000:])
    found = statuses(log, expected.get("log", PYTEST))
    if not found:
        sys.stdout.write(f"\nno test ran: the command ended with {exit_code}\n")
        return 1
    solved = is_solved(
        found,
        fail_to_pass=expected["fail_to_pass"],
        pass_to_pass=expected["pass_to_pass"],
        exit_code=exit_code,
    )
    partial = reward.with_name(f"{reward.name}.{os.getpid()}")
    partial.write_text("1\n" if solved else "0\n")
    partial.replace(reward)
    return 0


def _write_files(files: Path, workspace: Path, deleted: Iterable[str]) -> None:
    for path in deleted:
        (workspace / path).unlink(missing_ok=True)
    if files.is_dir():
        shutil.copytree(files, workspace, dirs_exist_ok=True)


def run_command(command: str, workspace: Path, logs: Path) -> tuple[int, str]:
    """Run a shell command to its end; returns its exit code and its log, the first 64 MiB of it."""
    logs.mkdir(parents=True, exist_ok=True)
    path = logs / "log.txt"
    with path.open("wb") as log:
        process = subprocess.Popen(  # noqa: S602 - the row's own command
            command,
            shell=True,
            cwd=workspace,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        exit_code = process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    with path.open("rb") as log:
        return exit_code, log.read(MAX_LOG_BYTES).decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
