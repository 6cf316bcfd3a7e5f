"""A served session in which a small repository was repaired, and what its user kept of it."""

import subprocess
from pathlib import Path
from typing import Any

from tests.support.environments.swebench_rows import git
from tests.support.feedback import events as examples
from tests.support.feedback.lives import NOW_MS, SERVER
from tests.support.feedback.turns import turn, write_turns

from etude.agent.chat import ChatFormat
from etude.common.blobs import Store
from etude.common.errors import EtudeError
from etude.feedback.ingest.intake import EventIntake

REQUEST = "Totals are wrong where a price is missing. Please repair that."
CODE = "def total(values):\n\n    return sum(values)\n"
FIXED = "def total(values):\n\n    return sum(each for each in values if each is not None)\n"
TESTS = """\
from shop import total


def test_sums():
    assert total([1, 2]) == 3


def test_leaves_out_what_is_missing():
    assert total([1, None, 2]) == 3
"""
RUNNER = """\
import importlib.util, sys
for path in sys.argv[1:]:
    sys.path.insert(0, ".")
    spec = importlib.util.spec_from_file_location("tests", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in [name for name in dir(module) if name.startswith("test_")]:
        try:
            getattr(module, name)()
            print(f"PASSED {path}::{name}")
        except Exception as error:
            print(f"FAILED {path}::{name} - {error}")
"""
"""Runs tests and prints what pytest would: sandboxes of processes have no pytest."""


def make_repository(folder: Path) -> tuple[str, str]:
    """A repository with a fault; returns its commit, and the patch that its user kept."""
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    (folder / "shop.py").write_text(CODE)
    (folder / "runner.py").write_text(RUNNER)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "base")
    commit = git(folder, "rev-parse", "HEAD").strip()
    (folder / "shop.py").write_text(FIXED)
    (folder / "test_shop.py").write_text(TESTS)
    git(folder, "add", "-A")
    return commit, git(folder, "diff", "--cached")


def serve_request(store: Store, chat: ChatFormat, user: str, text: str = REQUEST) -> None:
    """Record the first turn of a user's session."""
    prompt = chat.open("You help with code.", text).prompt
    write_turns(store, [turn(user, started_ms=NOW_MS, prompt=prompt)])


async def send(intake: EventIntake, kind: str, user: str, name: str = "", **fields: Any) -> None:
    """Send one event of a user.

    Raises:
        EtudeError: it was not stored.
    """
    event = examples.encoded(kind, id=f"{kind}-{user}-{name}", user=user, **fields)
    (answer,) = await intake.take([event], SERVER)
    if answer.status != 202:
        raise EtudeError(f"{kind} of {user}: {answer}")


def apply_patch(folder: Path, patch: str) -> None:
    """Apply a patch with git."""
    words = ["git", "apply", "--whitespace=nowarn", "-"]
    subprocess.run(words, input=patch.encode(), cwd=folder, check=True, capture_output=True)
