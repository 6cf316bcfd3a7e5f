"""Code search by a service: the product's and its shadow in training answer byte for byte alike."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.environments.pool_processes import Processes
from typing_extensions import override

from etude.agent.interactive.user_workspace import (
    Approver,
    Decision,
    DecisionListener,
    Edit,
    open_user_workspace,
)
from etude.agent.local import LocalEnvironment
from etude.agent.search.codebase import Codebase, SearchedFiles
from etude.agent.search.contents import content_digest
from etude.agent.search.remote import RemoteCodebase, SearchServiceError, identify_base
from etude.agent.search.shared_index import SharedIndex
from etude.agent.tool_calls import ToolCall
from etude.agent.toolsets import toolset
from etude.agent.turns import RolloutEnvironment
from etude.cli.environments.client import EnvironmentRequest
from etude.cli.environments.leased_tools import lease_environment
from etude.common.http_server import HttpServer, http_config, open_listener
from etude.envserver.code_search.app import SearchBases, SearchRoutes

FILES = {
    "shop/tax.py": "def add_tax(price, rate):\n    return price * (1 + rate)\n",
    "shop/sessions.py": "def remove_expired(sessions, now):\n    return [s for s in sessions]\n",
    "docs/notes.md": "Expired sessions are removed at night.\n",
    ".env": "TOKEN=1\n",
}
EDIT = {
    "path": "shop/sessions.py",
    "old_string": "[s for s in sessions]",
    "new_string": "[s for s in sessions if s.expires > now]",
}
CALLS = (
    ("codebase_search", {"query": "Where are expired sessions removed?"}),
    ("search_replace", EDIT),
    ("write_file", {"path": "shop/night.py", "content": "def remove_at_night():\n    pass\n"}),
    ("delete_file", {"path": "docs/notes.md"}),
    ("codebase_search", {"query": "Where are expired sessions removed?"}),
    ("codebase_search", {"query": "price with tax", "target_directories": ["shop"]}),
)


class Agreeing(Approver, DecisionListener):
    """A user who agrees to everything."""

    @override
    def note_edit(self, edit: Edit, decision: Decision) -> None:
        assert decision is Decision.ACCEPTED

    @override
    def note_command(self, decision: Decision) -> None:
        raise AssertionError

    @override
    async def decide_edit(self, edit: Edit) -> Decision:
        return Decision.ACCEPTED

    @override
    async def decide_command(self, command: str) -> Decision:
        raise AssertionError(command)


@contextlib.asynccontextmanager
async def serve(routes: SearchRoutes) -> AsyncIterator[str]:
    """A service on this machine; yields its address."""
    with open_listener("127.0.0.1", 0) as listener:
        server = HttpServer(http_config(routes.build()))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


def write_folder(folder: Path) -> Path:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


async def play(environment: RolloutEnvironment) -> list[str]:
    """Contents of the results of all calls."""
    played = []
    for number, (name, arguments) in enumerate(CALLS):
        call = ToolCall(f"{number}.0", name, json.dumps(arguments))
        (outcome,) = await environment.run([call])
        played.append(outcome.content)
    return played


def use_folder(folder: Path, service: str) -> LocalEnvironment:
    user = Agreeing()
    codebase = RemoteCodebase(address=service) if service else None
    workspace = open_user_workspace(folder, user, user, codebase=codebase)
    return LocalEnvironment(toolset("Standard"), workspace)


async def test_a_product_and_a_pool_that_names_its_shadow_have_the_same_answers(
    tmp_path: Path,
) -> None:
    product, shadow = SearchRoutes(SearchBases()), SearchRoutes(SearchBases())
    pool = Processes(tmp_path)
    async with serve(product) as address, serve(shadow) as other:
        described = json.loads(pool.pool_file.read_text())
        described["spec"]["search"] = {"service": other}
        pool.pool_file.write_text(json.dumps(described))
        try:
            for role in ("broker", "node"):
                pool.start(role)
            for role in ("broker", "node"):
                await pool.ready(role)
            uri = write_folder(tmp_path / "first").as_uri()
            wish = EnvironmentRequest("python", 60, 60, uri, toolset="Standard")
            async with lease_environment(f"127.0.0.1:{pool.ports['broker']}", wish) as environment:
                trained = await play(environment)
        finally:
            for role in [*pool.running]:
                pool.kill(role)
        used = await play(use_folder(write_folder(tmp_path / "user"), address))
    alone = await play(use_folder(write_folder(tmp_path / "alone"), ""))
    assert trained == used == alone
    assert "shop/sessions.py:" in used[0]
    assert "s.expires > now" in used[4]
    assert "docs/notes.md" not in used[4]


def searched(files: Mapping[str, str]) -> SearchedFiles:
    async def read(path: str) -> bytes | None:
        return files[path].encode()

    return SearchedFiles({path: content_digest(t.encode()) for path, t in files.items()}, read)


async def test_a_service_that_lost_its_bases_is_sent_them_again() -> None:
    files = searched({path: text for path, text in FILES.items() if path != ".env"})
    routes = SearchRoutes(SearchBases(cache_bytes=0))
    async with serve(routes) as address:
        remote = RemoteCodebase(address=address)
        first = await remote.search(files, "price with tax", (), 3)
        # Of several bases it keeps the newest alone.
        await RemoteCodebase(address=address).search(searched({"a.py": "x = 1\n"}), "xs", (), 3)
        assert await remote.search(files, "price with tax", (), 3) == first
    assert first == await Codebase().search(files, "price with tax", (), 3)
    with pytest.raises(SearchServiceError, match="does not answer"):
        await remote.search(files, "price with tax", (), 3)


async def test_a_service_with_another_embedder_than_the_pools_is_refused() -> None:
    async with serve(SearchRoutes(SearchBases())) as address:
        codebase = RemoteCodebase(SharedIndex(), address=address, backend="minilm-l6-v2")
        with pytest.raises(SearchServiceError, match="hashed-1, not minilm-l6-v2"):
            await codebase.search(searched({"a.py": "x = 1\n"}), "price", (), 3)


QUERY: dict[str, Any] = {
    "base": identify_base({"a.py": b"x = 1\n"}),
    "removed": [],
    "changed": {},
    "question": "price",
    "folders": [],
    "limit": 3,
}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[" * 100_000, 400),
        (json.dumps({**QUERY, "limit": 10**6}).encode(), 400),
        (json.dumps({**QUERY, "more": 1}).encode(), 400),
        (json.dumps({**QUERY, "changed": {"b.py": "%"}}).encode(), 400),
        (json.dumps({**QUERY, "base": "0" * 64}).encode(), 404),
        (b" " * (33 << 20), 413),
        (json.dumps(QUERY).encode(), 200),
    ],
)
async def test_a_hostile_question_is_refused_by_its_status(body: bytes, status: int) -> None:
    async with serve(SearchRoutes(SearchBases())) as address, httpx.AsyncClient() as client:
        base = {"a.py": "eCA9IDEK"}
        for name, files, expected in (
            ("0" * 64, base, 400),
            (QUERY["base"], ["a.py"], 400),
            (QUERY["base"], base, 200),
        ):
            answer = await client.put(f"{address}/v1/bases/{name}", json=files)
            assert answer.status_code == expected, answer.text
        answer = await client.post(f"{address}/v1/search", content=body)
        assert answer.status_code == status, answer.text
