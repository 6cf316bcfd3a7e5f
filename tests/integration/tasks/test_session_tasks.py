"""Sessions of users as tasks, by the verb: listed, reviewed, proved in a sandbox, withdrawn."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.support import needs
from tests.support.feedback.lives import NOW_MS, SECRET, Stores, living
from tests.support.feedback.sessions import REQUEST, make_repository, send
from tests.support.feedback.turns import turn, write_turns

from etude.common.blobs import open_store
from etude.common.harbor import task as harbor_task

_SANDBOX = "[DriverUnavailable]"


class Workplace:
    """Folders of a service, and the verb at work on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "secret").write_text(bytes(range(32)).hex())
        uris = [(folder / name).as_uri() for name in ("ledger", "keys")]
        self.stores = Stores(*map(open_store, uris))  # type: ignore[arg-type]  # stores as well
        stores = ("--store", uris[0], "--key-store", uris[1])
        self.access = (*stores, "--ledger", "test", "--secret", str(folder / "secret"))
        self.review = folder / "review.yaml"

    def run(self, verb: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [
            str(Path(sys.executable).with_name("etude")),
            "tasks",
            verb,
            *self.access,
            *words,
        ]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def serve(self, patch: str, *users: str) -> None:
        """Record the session of each user, who kept the patch."""

        async def record() -> None:
            async with living(self.stores) as intake:
                for user in users:
                    await send(intake, "demonstration", user, text=patch)
                    write_turns(self.stores.ledger, [turn(user, started_ms=NOW_MS)])

        asyncio.run(record())

    def erase(self, user: str) -> None:
        async def record() -> None:
            async with living(self.stores) as intake:
                await intake.ledger.erase_user(SECRET.user_id("acme", user), now_ms=NOW_MS)

        asyncio.run(record())

    def accept(self, *users: str, **fields: object) -> None:
        """Accept the sessions of users, as a person who corrects some fields."""
        review = yaml.safe_load(self.review.read_text())
        digests = {SECRET.user_id("acme", user).digest for user in users}
        for entry in review["sessions"]:
            if entry["user"] in digests:
                entry |= {"accepted": True, "request": REQUEST, **fields}
        self.review.write_text(yaml.safe_dump(review))

    def write(self) -> subprocess.CompletedProcess[str]:
        words = ("--review", str(self.review), "--repo", str(self.folder / "shop"))
        more = ("--out", str(self.folder / "tasks"), "--test-command", "python3 runner.py")
        done = self.run("from-sessions", *words, *more)
        if _SANDBOX in done.stderr and not needs.is_required("sandbox", "qemu"):
            pytest.skip(done.stderr)
        return done


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path)


def test_sessions_that_a_person_accepts_become_tasks_that_a_sandbox_proves(
    workplace: Workplace,
) -> None:
    commit, patch = make_repository(workplace.folder / "shop")
    workplace.serve(patch, "kept", "unproved", "erased", "unread")
    words = ("--review", str(workplace.review), "--tenant", "acme", "--terms", "2026-11")
    listed = workplace.run("from-sessions", *words)
    assert "4 candidates, 0 other sessions" in listed.stdout, listed.stderr
    assert "4 NoRequest" in listed.stdout
    workplace.accept("kept", "erased", commit=commit)
    wrong = patch.replace("not None", "not 7").partition("diff --git a/test_")[0]
    workplace.accept("unproved", commit=commit, reference=wrong)
    workplace.erase("erased")

    written = workplace.write()
    assert written.returncode == 1, "some are refused"
    (task_id,) = written.stdout.split()
    assert "refused: Erased" in written.stderr
    assert "its solution scores 0, not 1" in written.stderr
    assert "changes 2 lines in 1 files" in written.stderr
    task = harbor_task.read_task(workplace.folder / "tasks" / task_id)
    assert task.instruction == REQUEST
    assert set(harbor_task.read_files(task.environment)) == {"shop.py", "runner.py"}
    assert [each.name for each in (workplace.folder / "tasks").iterdir()] == [task_id]

    assert workplace.run("withdrawn", "--terms", "2026-11").stdout == ""
    workplace.erase("kept")
    withdrawn = workplace.run("withdrawn", "--terms", "2026-11")
    assert (withdrawn.returncode, f"{task_id} Erased" in withdrawn.stdout) == (1, True)
