"""`etude agent replay`: sealed turns of `etude agent work`, once more in a leased environment."""

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.support import warm_etude
from tests.support.environments.pool_processes import Processes
from tests.support.feedback.events import TERMS
from tests.support.feedback.lives import SECRET, Stores, living, send
from tests.support.gateway.served import MODEL, OPENING, PlayedEngine, serve_route, start_engine

from etude.agent.chat import ChatFormat
from etude.agent.tool_calls import render_call
from etude.common.blobs import open_store
from etude.common.rpc.server import Server
from etude.feedback.turn_keys import TurnKeyService
from etude.v1 import turns_pb2_grpc

TOKENIZER = Path(__file__).parents[2] / "unit/agent/model"
EDIT = {"path": "core.py", "old_string": "a - b", "new_string": "a + b"}
TURNS = (
    "I look. "
    + render_call("read_file", {"path": "core.py"})
    + render_call("read_file", {"path": "notes.txt"}),
    render_call("search_replace", EDIT),
    render_call("run_terminal", {"command": "python3 -c 'import core; print(core.add(1, 2))'"}),
    "It adds now.",
)


@dataclass
class Recorded:
    """A session that a gateway recorded, and the folder as it was before."""

    folder: Path
    session: str
    broker: str

    async def replay(self, *words: str, session: str = "", terms: str = TERMS) -> Any:
        options = {
            "--folder": str(self.folder / "before"),
            "--model": str(TOKENIZER),
            "--tenant": "acme",
            "--terms": terms,
            "--store": (self.folder / "ledger").as_uri(),
            "--key-store": (self.folder / "user-keys").as_uri(),
            "--secret": str(self.folder / "secret"),
            "--ledger": "test",
            "--template": "python",
        }
        given = [word for option in options.items() for word in option]
        place = (session or self.session, self.broker)
        return await etude(self.folder, "agent", "replay", *place, *given, *words)


async def etude(folder: Path, *words: str, **env: str) -> Any:
    given = {"PATH": os.environ["PATH"], "HOME": str(folder), "COLUMNS": "200", **env}
    return await asyncio.to_thread(warm_etude.etude, *words, cwd=folder, env=given)


@pytest.fixture
async def recorded(tmp_path: Path) -> AsyncIterator[Recorded]:
    """A session of `etude agent work`, whose turns are sealed under a key of the ledger."""
    users = tmp_path / "my-project"
    users.mkdir()
    (users / "core.py").write_text("def add(a, b):\n    return a - b\n")
    (users / "notes.txt").write_text("first\nsecond\n")
    shutil.copytree(users, tmp_path / "before")
    (tmp_path / "secret").write_text(SECRET.master.hex())
    pool = Processes(tmp_path)
    for role in ("broker", "node"):
        pool.start(role)
    try:
        session = await record(tmp_path)
        for role in ("broker", "node"):
            await pool.ready(role)
        yield Recorded(tmp_path, session, f"127.0.0.1:{pool.ports['broker']}")
    finally:
        for role in [*pool.running]:
            pool.kill(role)


async def record(folder: Path) -> str:
    """Let the user's agent work; returns the name of the session."""
    chat = ChatFormat.load(TOKENIZER)
    played = PlayedEngine(chat, lambda prompt: TURNS[prompt.count(OPENING) - 1], 90_000)
    engine = await start_engine(played)
    stores: Any = Stores(
        open_store((folder / "ledger").as_uri()),  # type: ignore[arg-type] # as memory has them
        open_store((folder / "user-keys").as_uri()),  # type: ignore[arg-type]
    )
    async with living(stores) as intake:
        assert await send(intake, "shown", "alice") == 202
        keys = Server(["etude.v1.TurnKeyService"])
        service = TurnKeyService(intake.ledger)
        turns_pb2_grpc.add_TurnKeyServiceServicer_to_server(service, keys.grpc_server)
        await keys.start()
        route = {
            "recordUnencrypted": False,
            "feedback": f"127.0.0.1:{keys.port}",
            "storage": {"uri": (folder / "ledger").as_uri()},
        }
        targets = [f"127.0.0.1:{engine.port}"]
        async with serve_route(folder, chat, targets, route) as gateway:
            gateway.store = open_store((folder / "ledger").as_uri())
            done = await etude(
                folder,
                *("agent", "work", "my-project", "--model", MODEL, "--yes", "--commands", "Fix."),
                ETUDE_API_KEY=gateway.key,
                ETUDE_GATEWAY=gateway.url,
            )
            assert done.returncode == 0, done.stderr
            (session,) = {each.rollout_id for each in await gateway.records()}
        await keys.stop(0)
    await engine.stop(0)
    return session


async def test_a_recorded_session_replays_and_a_changed_file_is_one_difference(
    recorded: Recorded,
) -> None:
    done = await recorded.replay()
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "4 turns, 4 calls, 0 differences" in done.stderr
    (recorded.folder / "before/notes.txt").write_text("first\nchanged\n")
    done = await recorded.replay()
    assert done.returncode == 1, done.stderr
    assert 'turn 0, call 1: read_file {"path":"notes.txt"}' in done.stdout
    changed = [line for line in done.stdout.splitlines() if line[:1] in "+-"]
    assert [line[0] for line in changed[2:]] == ["-", "+"]
    assert changed[2].endswith("second")
    assert changed[3].endswith("changed")
    done = await recorded.replay("--json")
    (row,) = (json.loads(line) for line in done.stdout.splitlines())
    assert (row["turn"], row["call"], row["tool"]) == (0, 1, "read_file")
    # Of users who do not allow it, and of unknown sessions, nothing is read.
    for refused, code in (({"terms": "2020-01"}, 5), ({"session": "0" * 32}, 3)):
        done = await recorded.replay(**refused)
        assert done.returncode == code, done.stderr
        assert "fix:" in done.stderr
