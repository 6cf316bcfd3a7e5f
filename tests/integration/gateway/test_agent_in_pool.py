"""`etude agent work --pool`: a real broker, host and gateway, and a user who decides on patches."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.support import warm_etude
from tests.support.environments.pool_processes import Processes
from tests.support.feedback.events import TERMS
from tests.support.gateway.served import MODEL, OPENING, PlayedEngine, ServedGateway, serve_gateway

from etude.agent.chat import ChatFormat
from etude.agent.interactive.consent import AgentState, StoredConsent
from etude.agent.tool_calls import render_call

ROOT = Path(__file__).parents[3]
ENTRY = (sys.executable, "-c", "from etude.cli.main import main; main()")
LIMIT_S = 90.0
ADD = {"path": "core.py", "old_string": "a - b", "new_string": "a + b"}
NAME = {"path": "core.py", "old_string": "def add", "new_string": "def plus"}
RUN = "./run.sh pytest && touch made.log left.txt && rm notes.txt"
TURNS = {
    "Fix add.": (
        "I look. " + render_call("read_file", {"path": "core.py"}),
        render_call("search_replace", ADD),
        render_call("run_terminal", {"command": RUN}),
        "It adds now.",
    ),
    "Rename add.": (render_call("search_replace", NAME), "Renamed."),
    "Look.": (render_call("list_dir", {}), "I looked."),
    "Add, then fail.": (render_call("search_replace", ADD),),
    "Fail.": (),
    "Wait.": (render_call("run_terminal", {"command": "sleep 60"}),),
}


def say(prompt: str) -> str:
    """The next turn of the instruction that the prompt has."""
    (turns,) = (turns for instruction, turns in TURNS.items() if instruction in prompt)
    return turns[prompt.count(OPENING) - 1]


@dataclass
class Place:
    """A user's machine, with the gateway and the pool that it reaches."""

    folder: Path
    gateway: ServedGateway
    pool: Processes

    @property
    def users(self) -> Path:
        return self.folder / "my-project"

    @property
    def home(self) -> AgentState:
        return AgentState(self.folder / "state" / "etude" / "agent")

    @property
    def env(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "XDG_STATE_HOME": str(self.folder / "state"),
            "ETUDE_API_KEY": self.gateway.key,
            "ETUDE_GATEWAY": self.gateway.url,
            "COLUMNS": "200",
        }

    @property
    def broker(self) -> str:
        return f"127.0.0.1:{self.pool.ports['broker']}"

    async def etude(self, *words: str) -> Any:
        return await asyncio.to_thread(warm_etude.etude, *words, cwd=self.folder, env=self.env)

    def work(self, *words: str, pool: str = "") -> tuple[str, ...]:
        options = ("--model", MODEL, "--pool", pool or self.broker, "--template", "python")
        return ("agent", "work", "my-project", *options, *words)

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """Kind and payload of each event that waits."""
        lines = self.home.spool.read_batch(max_events=999, max_bytes=1 << 30).lines
        read = [json.loads(line) for line in lines]
        return [(each["type"].split(".")[-2], each["data"]["payload"]) for each in read]

    def num_leases(self) -> int:
        return len([*self.folder.glob("scratch/leases/*/state.json")])


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    chat = ChatFormat.load(ROOT / "tests/unit/agent/model")
    pool = Processes(tmp_path)
    for role in ("broker", "node"):
        pool.start(role)
    try:
        async with serve_gateway(tmp_path, [PlayedEngine(chat, say, 90_000)], {}) as gateway:
            place = Place(tmp_path, gateway, pool)
            place.users.mkdir()
            (place.users / "core.py").write_text("def add(a, b):\n    return a - b\n")
            (place.users / "notes.txt").write_text("notes\n")
            (place.users / ".gitignore").write_text("*.log\n")
            (place.users / "run.sh").write_text("#!/bin/sh\necho 2 passed\n")
            (place.users / "run.sh").chmod(0o755)
            decision = StoredConsent(
                service="http://127.0.0.1:1",
                tenant="acme",
                user="alice",
                terms=TERMS,
                granted=True,
                decided="2026-11-01T08:00:00.000+00:00",
            )
            place.home.store_consent(decision)
            for role in ("broker", "node"):
                await pool.ready(role)
            yield place
    finally:
        for role in [*pool.running]:
            pool.kill(role)


def read_files(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.iterdir()}


def apply_by_git(place: Place, patch: str) -> dict[str, bytes]:
    """Files of a copy of the user's folder, after a patch."""
    copy = place.folder / "copy"
    shutil.copytree(place.users, copy)
    subprocess.run(["git", "apply", patch], cwd=copy, check=True)
    return read_files(copy)


async def test_work_in_a_pool_comes_back_as_patches_that_the_user_decides_on(place: Place) -> None:
    before = read_files(place.users)
    done = await place.etude(*place.work("Fix add.", "Rename add.", "Look."))
    assert done.returncode == 0, done.stderr
    assert "on a copy of 4 files" in done.stderr
    assert "[1] It adds now." in done.stdout
    assert "[3] nothing was changed" in done.stderr
    assert read_files(place.users) == before
    kinds = [kind for kind, _ in place.events()]
    assert kinds.count("task_closed") == 1
    assert ("test_result", {"turn": 2, "numPassed": 2, "numFailed": 0, "numErrored": 0}) in (
        place.events()
    )
    listed = await place.etude("agent", "patches", "--json")
    rows = {row["instruction"]: row for row in map(json.loads, listed.stdout.splitlines())}
    assert rows["Fix add."]["files"] == ["core.py", "left.txt", "notes.txt"]
    assert rows["Rename add."]["files"] == ["core.py"]

    # What git makes of the patch in a copy is what is accepted here.
    expected = await asyncio.to_thread(apply_by_git, place, rows["Fix add."]["patch"])
    done = await place.etude("agent", "accept", rows["Fix add."]["name"])
    assert done.returncode == 0, done.stderr
    assert (place.users / "core.py").read_text() == "def add(a, b):\n    return a + b\n"
    assert read_files(place.users) == expected
    assert [kind for kind, _ in place.events()][len(kinds) :] == [
        *("accepted", "edit_applied", "edit_applied", "task_closed")
    ]

    done = await place.etude("agent", "accept", rows["Rename add."]["name"][:8])
    assert done.returncode == 8, done.stderr
    assert "changed since the work began: core.py" in done.stderr
    assert "git apply --3way" in done.stderr
    done = await place.etude("agent", "reject", rows["Rename add."]["name"])
    assert done.returncode == 0, done.stderr
    assert place.events()[-1] == ("task_closed", {"outcome": "Abandoned"})
    assert (await place.etude("agent", "patches", "--json")).stdout == ""
    assert place.num_leases() == 0


async def test_changes_before_a_fault_of_the_gateway_are_a_patch_too(place: Place) -> None:
    done = await place.etude(*place.work("Add, then fail.", "Fail."))
    assert done.returncode != 0
    assert done.stderr.count("the work did not end") == 2, done.stderr
    assert "[2] nothing was changed" in done.stderr
    listed = await place.etude("agent", "patches", "--json")
    (row,) = map(json.loads, listed.stdout.splitlines())
    assert (row["instruction"], row["files"]) == ("Add, then fail.", ["core.py"])
    assert place.num_leases() == 0


async def test_ctrl_c_gives_the_environment_back_and_an_absent_pool_is_named(
    place: Place,
) -> None:
    process = await asyncio.create_subprocess_exec(
        *ENTRY,
        *place.work("Wait."),
        cwd=place.folder,
        env=place.env,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    async with asyncio.timeout(LIMIT_S):
        while "works in" not in (line := (await process.stderr.readline()).decode()):
            assert line, "it ended"
        assert place.num_leases() == 1
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130
        assert "Traceback" not in (await process.stderr.read()).decode()
        while place.num_leases():  # noqa: ASYNC110 - the host tells no test
            await asyncio.sleep(0.1)
    # Told of only if a turn had come by then.
    assert [each for each in place.events() if each[0] == "task_closed"][:1] in (
        [],
        [("task_closed", {"outcome": "Abandoned"})],
    )

    for words, code, text in (
        (place.work("Look.", pool="127.0.0.1:1"), 6, "check that it runs"),
        (place.work("Look.", pool="no-run"), 3, "no run folder"),
        (place.work(), 2, "give the work"),
    ):
        done = await place.etude(*words)
        assert done.returncode == code, done.stderr
        assert text in done.stderr
        assert "fix:" in done.stderr
        assert "Traceback" not in done.stderr
