"""`etude audit`: every rollout accounted for, none counted twice."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from etude.cli import runs
from etude.cli.output import Exit, console, say
from etude.cli.verbs.options import RunFolder
from etude.common.errors import Problem, UserError


def audit(
    name: RunFolder,
) -> None:
    """Judge a run by its own journal: accepted = trained + dropped + queued, nothing twice."""
    account = audit_folder(runs.folder_of(name))
    console().print_json(json.dumps(account), ensure_ascii=True)
    for finding in account["findings"]:
        say(finding)
    if account["findings"]:
        raise SystemExit(Exit.NO)


def audit_folder(folder: Path) -> dict[str, Any]:
    """The account of a run folder, from a process of the trainer's part."""
    command = [sys.executable, "-m", "etude.trainer.commands.audit", f"file://{folder.resolve()}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        account: dict[str, Any] = json.loads(done.stdout)
    except ValueError as cause:
        raise UserError(
            Problem(
                "NotFound",
                what=f"has no journal that can be read: {done.stderr.strip()}",
                where=str(folder),
                fix="give the folder of a run that reached reinforcement learning",
            )
        ) from cause
    return account
