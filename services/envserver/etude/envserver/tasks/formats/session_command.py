"""The program behind `etude tasks from-sessions` that writes tasks: only proved ones stay.

python -m etude.envserver.tasks.formats.session_command --repo DIR --out DIR < rows.jsonl
"""

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from etude.common.errors import UserError
from etude.envserver import exit_codes
from etude.envserver.tasks import runner, verify
from etude.envserver.tasks.formats import git_mirror, swebench
from etude.envserver.tasks.formats.command import write_task
from etude.envserver.tasks.formats.imported_task import ImportRefusedError
from etude.envserver.tasks.formats.sessions import SessionImporter, parse_rows


def write_proved(
    importer: SessionImporter, lines: Sequence[bytes], out: Path, choice: runner.RunnerChoice
) -> int:
    """Write the task of each row, and keep those that a sandbox proves; the rest is printed.

    Returns:
        The number of refused rows.

    Raises:
        ImportRefusedError: a line is no row.
        UserError: this machine has no sandbox for it.
    """
    out.mkdir(parents=True, exist_ok=True)
    refused = 0
    # Beside the tasks, so that a rename is enough; its name begins with a dot, which no task has.
    with tempfile.TemporaryDirectory(prefix=".unproved-", dir=out) as folder:
        unproved = Path(folder)
        for row in parse_rows(lines):
            try:
                if (out / row.task_id).exists():
                    raise ImportRefusedError(str(out / row.task_id), "exists already")
                task = importer.import_row(row)
                write_task(task, unproved)
            except UserError as error:
                refused += 1
                sys.stderr.write(f"{row.task_id}: refused: {error}\n")
                continue
            for note in task.notes:
                sys.stderr.write(f"{row.task_id}: note: {note}\n")
        written = sorted(unproved.iterdir())
        for proof in asyncio.run(verify.verify_tasks(written, choice)):
            if proof.findings:
                refused += 1
                what = "; ".join(proof.findings)
                sys.stderr.write(f"{proof.task_id}: refused: it is not proved: {what}\n")
            else:
                shutil.move(unproved / proof.task_id, out / proof.task_id)
                sys.stdout.write(f"{proof.task_id}\n")
    return refused


def main(arguments: Sequence[str]) -> int:
    """Write tasks of the rows on stdin; exit with 1 if one was refused."""
    parser = runner.make_parser("etude.envserver.tasks.formats.session_command", takes_tasks=False)
    parser.add_argument("--repo", type=Path, required=True, help="repository, or a bundle of it")
    parser.add_argument("--commit", default="", help="for sessions that name none")
    parser.add_argument("--test-command", default=swebench.TEST_COMMAND)
    parser.add_argument("--out", type=Path, required=True, help="folder of the new tasks")
    given = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="etude-import-") as scratch:
            importer = SessionImporter(
                mirror=git_mirror.open_mirror(given.repo, Path(scratch)),
                commit=given.commit,
                test_command=given.test_command or swebench.TEST_COMMAND,
            )
            lines = sys.stdin.buffer.read().splitlines()
            refused = write_proved(importer, lines, given.out, runner.parse_choice(given))
    except (UserError, OSError) as error:
        return exit_codes.report_error(error)
    return exit_codes.NO if refused else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
