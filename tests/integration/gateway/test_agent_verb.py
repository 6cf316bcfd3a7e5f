"""`etude agent` as its user types it: on a terminal, with a real gateway and feedback service."""

import asyncio
import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.feedback.events import TERMS
from tests.support.feedback.process import FeedbackProcess
from tests.support.gateway.served import MODEL, OPENING, PlayedEngine, ServedGateway, serve_gateway

from etude.agent.chat import ChatFormat
from etude.agent.tool_calls import render_call
from etude.common.feedback.spool import EventSpool

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/how-to/use-the-agent.md"
ENTRY = (sys.executable, "-c", "from etude.cli.main import main; main()")
LIMIT_S = 60.0
EDIT = {"path": "core.py", "old_string": "a - b", "new_string": "a + b"}
TURNS = (
    "I look. " + render_call("read_file", {"path": "core.py"}),
    render_call("search_replace", EDIT),
    render_call("run_terminal", {"command": "echo pytest: 2 passed, 1 failed"}),
    "It adds now.",
    "You are welcome.",
)


@dataclass
class Place:
    """A user's machine, with the services that it reaches."""

    folder: Path
    gateway: ServedGateway
    feedback: FeedbackProcess

    @property
    def state(self) -> Path:
        return self.folder / "state" / "etude" / "agent"

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

    async def etude(self, *words: str) -> "subprocess.CompletedProcess[str]":
        def run() -> "subprocess.CompletedProcess[str]":
            return subprocess.run(
                [*ENTRY, *words],
                cwd=self.folder,
                env=self.env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=LIMIT_S,
            )

        return await asyncio.to_thread(run)

    async def agree(self) -> None:
        options = ("--feedback", self.feedback.url, "--tenant", "acme", "--user", "alice")
        done = await self.etude("agent", "consent", *options, "--terms", TERMS, "--yes")
        assert done.returncode == 0, done.stderr

    async def events(self) -> list[tuple[str, dict[str, Any]]]:
        """Kind and payload of each event that the service has."""
        async with httpx.AsyncClient(headers=self.feedback.headers, timeout=60) as client:
            answer = await client.get(f"{self.feedback.url}/v1/events", params={"after": 0})
            events = [each["event"] for each in answer.raise_for_status().json()["events"]]
        return [(each["type"].split(".")[-2], each["data"]["payload"]) for each in events]

    def waiting_outcome(self) -> str:
        lines = EventSpool(self.state / "spool").read_batch(max_events=999, max_bytes=1 << 30).lines
        return str(json.loads(lines[-1])["data"]["payload"]["outcome"])

    def waiting_kinds(self) -> list[str]:
        lines = EventSpool(self.state / "spool").read_batch(max_events=999, max_bytes=1 << 30).lines
        return re.findall(r"dev\.etude\.feedback\.([a-z_]+)\.v1", b"".join(lines).decode())


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    chat = ChatFormat.load(ROOT / "tests/unit/agent/model")
    engine = PlayedEngine(chat, lambda prompt: TURNS[prompt.count(OPENING) - 1], 90_000)
    (tmp_path / "feedback").mkdir()
    feedback = FeedbackProcess.prepare(tmp_path / "feedback")
    async with serve_gateway(tmp_path, [engine], {}) as gateway:
        line = gateway.keys_file.read_text().split()
        with (feedback.folder / "api-keys").open("a") as file:
            file.write(f"alice feedback {line[2]} tenant=acme consent={TERMS}\n")
        (tmp_path / "my-project").mkdir()
        (tmp_path / "my-project" / "core.py").write_text("def add(a, b):\n    return a - b\n")
        yield Place(tmp_path, gateway, feedback)
        if feedback.process is not None and feedback.process.returncode is None:
            await feedback.stop(signal.SIGKILL)


class Terminal:
    """A terminal with a command of a user."""

    def __init__(self, place: Place, *words: str) -> None:
        pid, self.screen = pty.fork()
        if pid == 0:
            os.chdir(place.folder)
            # As a shell does: what started the tests may ignore it.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.execve(sys.executable, [*ENTRY, *words], place.env)
        self.pid, self.shown = pid, ""

    async def wait_for(self, text: str) -> None:
        await asyncio.to_thread(self._read_until, text)

    def _read_until(self, text: str) -> None:
        ends_s = time.monotonic() + LIMIT_S
        while text not in self.shown:
            left_s = max(0.0, ends_s - time.monotonic())
            assert select.select([self.screen], [], [], left_s)[0], f"no {text!r}: {self.shown}"
            self.shown += os.read(self.screen, 4096).decode()
        self.shown = self.shown.split(text, 1)[1]

    def type(self, text: str) -> None:
        os.write(self.screen, text.encode())

    async def end(self) -> int:
        def wait() -> int:
            try:
                while data := os.read(self.screen, 4096):
                    self.shown += data.decode()
            except OSError:
                pass  # the terminal of a process that ended
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

        try:
            return await asyncio.wait_for(asyncio.to_thread(wait), LIMIT_S)
        finally:
            os.close(self.screen)


def documented(place: Place) -> list[list[str]]:
    """Commands of the page, with the addresses and names of this place.

    Work in a pool, and replays of its operator, have tests of their own.
    """
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = [line.split("  #")[0] for block in blocks for line in block.splitlines()]
    elsewhere = (" --store ", " replay ", " --pool ", " patches", " accept ", " reject ")
    lines = [line for line in lines if not any(word in line for word in elsewhere)]
    names = {
        "https://gateway.example.com": place.gateway.url,
        "https://feedback.example.com": place.feedback.url,
        "code-7b": MODEL,
        "u-1": "alice",
    }
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("etude ")]
    return [[names.get(word, word) for word in words] for words in commands]


async def test_the_documented_commands_work_as_they_stand(place: Place) -> None:
    await place.feedback.start()
    conversation, *commands = documented(place)
    assert conversation[:2] == ["agent", "work"], "it needs a terminal: see the tests below"
    # People agree before they work, and take it back at the end.
    order = ["consent", "work", "observe"]
    commands.sort(key=lambda words: ("--revoke" in words, order.index(words[1])))
    assert {words[1] for words in commands} == {"consent", "work", "observe"}
    for words in commands:
        more = {"work": ["--yes", "--commands"], "consent": ["--yes"] if "--user" in words else []}
        done = await place.etude(*words, *more.get(words[1], []))
        assert done.returncode == 0, (words, done.stdout, done.stderr)


async def test_the_events_of_a_piece_of_work_reach_the_service_with_consent(place: Place) -> None:
    await place.feedback.start()
    await place.agree()
    work = ("agent", "work", "my-project", "--model", MODEL, "--yes", "--commands", "Fix add.")
    done = await place.etude(*work)
    assert done.returncode == 0, done.stderr
    assert "-    return a - b\n+    return a + b" in done.stdout
    assert "$ echo pytest: 2 passed, 1 failed" in done.stdout
    assert (place.folder / "my-project/core.py").read_text().endswith("a + b\n")
    events = await place.events()
    assert [kind for kind, _ in events] == [
        *("shown", "turn_ended", "shown", "edit_applied", "turn_ended"),
        *("shown", "test_result", "turn_ended", "shown", "turn_ended", "task_closed"),
    ]
    payloads = dict(events)
    assert payloads["test_result"] == {"turn": 2, "numPassed": 2, "numFailed": 1, "numErrored": 0}
    assert payloads["task_closed"] == {"outcome": "Closed"}
    assert payloads["edit_applied"]["numLines"] == 1
    (session,) = {each.rollout_id for each in await place.gateway.records()}
    assert f"session {session}" in done.stderr


async def test_without_consent_nothing_is_kept_or_sent(place: Place) -> None:
    await place.feedback.start()
    done = await place.etude("agent", "work", "my-project", "--model", MODEL, "--yes", "Fix add.")
    assert done.returncode == 0, done.stderr
    assert "no feedback is sent" in done.stderr
    assert await place.events() == []
    assert not place.state.exists()


async def test_events_wait_while_the_service_is_away(place: Place) -> None:
    await place.agree()
    done = await place.etude("agent", "work", "my-project", "--model", MODEL, "--yes", "Fix add.")
    assert done.returncode == 0, done.stderr
    waiting = place.waiting_kinds()
    assert "events wait" in done.stderr
    assert waiting[-1] == "task_closed"
    await place.feedback.start()
    done = await place.etude("agent", "observe")
    assert done.returncode == 0, done.stderr
    assert [kind for kind, _ in await place.events()] == waiting
    assert place.waiting_kinds() == []


async def test_a_user_is_asked_answers_and_stops_with_ctrl_c(place: Place) -> None:
    await place.agree()
    terminal = Terminal(place, "agent", "work", "my-project", "--model", MODEL)
    await terminal.wait_for("> ")
    terminal.type("Fix add.\n")
    await terminal.wait_for("+    return a + b")
    await terminal.wait_for("edit core.py? [y/N] ")
    terminal.type("y\n")
    await terminal.wait_for("run it? [y/N] ")
    terminal.type("\x03")
    await terminal.wait_for("stopped; Ctrl-D ends the conversation")
    await terminal.wait_for("> ")
    terminal.type("Thanks.\n")
    await terminal.wait_for("It adds now.")
    await terminal.wait_for("> ")
    terminal.type("/abandon\n")
    assert await terminal.end() == 0
    kinds = place.waiting_kinds()
    expected = ["shown", "accepted", "edit_applied", "turn_ended", "turn_ended", "followup"]
    assert kinds[2:-3] == expected, kinds
    assert kinds[-1] == "task_closed"
    assert (place.folder / "my-project/core.py").read_text().endswith("a + b\n")


async def test_ctrl_c_ends_a_single_piece_of_work_as_given_up(place: Place) -> None:
    await place.agree()
    terminal = Terminal(place, "agent", "work", "my-project", "--model", MODEL, "Fix add.")
    await terminal.wait_for("edit core.py? [y/N] ")
    terminal.type("\x03")
    assert await terminal.end() == 130
    assert "Traceback" not in terminal.shown
    assert place.waiting_kinds()[-2:] == ["turn_ended", "task_closed"]
    assert (place.folder / "my-project/core.py").read_text().endswith("a - b\n")


@pytest.mark.parametrize("words", [("Fix add.",), ()])
async def test_a_signal_ends_the_task_as_given_up(place: Place, words: Sequence[str]) -> None:
    await place.agree()
    terminal = Terminal(place, "agent", "work", "my-project", "--model", MODEL, *words)
    if not words:
        await terminal.wait_for("> ")
        terminal.type("Fix add.\n")
    await terminal.wait_for("edit core.py? [y/N] ")
    os.kill(terminal.pid, signal.SIGTERM)
    assert await terminal.end() == 128 + signal.SIGTERM
    assert "Traceback" not in terminal.shown
    assert place.waiting_kinds()[-2:] == ["turn_ended", "task_closed"]
    assert place.waiting_outcome() == "Abandoned"


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("none", "--model", MODEL, "Fix."), 3, "name the folder"),
        (("my-project", "--model", MODEL), 2, "give the work"),
        (("my-project", "--model", "other", "Fix."), 3, "/v1/models"),
        (("my-project", "--model", MODEL, "--gateway", "http://a.example", "F"), 4, "https://"),
        (
            ("my-project", "--model", MODEL, "--gateway", "http://127.0.0.1:1", "F"),
            1,
            "127.0.0.1:1",
        ),
    ],
)
async def test_a_wrong_command_is_refused_with_a_fix(
    place: Place, words: Sequence[str], code: int, text: str
) -> None:
    done = await place.etude("agent", "work", *words)
    assert done.returncode == code, done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr
