"""OpenEnv's validator and client against our edge, in an environment of their own."""

import asyncio
import json
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import websockets

Edge = Any  # the fixture's class lives in conftest, which test modules cannot import
PACKAGE = "openenv-core==0.3.0"
ROOT = Path(__file__).parents[3]
UV = shutil.which("uv") or str(ROOT / ".tools" / "bin" / "uv")
LIMIT_S = 600
"""The package brings a user interface and data frames with it; a busy machine imports for long."""


def theirs(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a program with their package."""
    command = [UV, "run", "--isolated", "--no-project", "--python", "3.11", "--with", PACKAGE]
    return subprocess.run(
        [*command, *words], capture_output=True, text=True, check=False, timeout=LIMIT_S
    )


@pytest.fixture(scope="module")
def package() -> None:
    if theirs("python", "-c", "").returncode:
        if os.environ.get("ETUDE_REQUIRE") == "clients":
            pytest.fail(f"{PACKAGE} cannot be installed")
        pytest.skip(f"{PACKAGE} cannot be installed here")


def base(edge: Edge, key: str) -> str:
    return f"{edge.url}/openenv/{key}/python"


@pytest.mark.usefixtures("package")
@pytest.mark.long
@pytest.mark.parametrize(("role", "mode"), [("key", "simulation"), ("tools_key", "production")])
def test_the_validator_finds_nothing_wrong(edge: Edge, role: str, mode: str) -> None:
    done = theirs("openenv", "validate", "--url", base(edge, getattr(edge, role)), "--json")

    report = json.loads(done.stdout)
    assert (done.returncode, report["passed"], report["mode"]) == (0, True, mode), report
    assert [c["id"] for c in report["criteria"] if not c["passed"]] == []
    assert len(report["criteria"]) == 6


@pytest.mark.usefixtures("package")
@pytest.mark.long
def test_their_client_runs_unchanged(edge: Edge) -> None:
    script = Path(__file__).parent / "openenv_client.py"

    done = theirs("python", str(script), base(edge, edge.key))

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        [None, False, 14],
        "Created a.txt (5 bytes).",
        "1|hello",
        {"episode_id": "first", "step_count": 2},
        "Server error: Invalid message (code: VALIDATION_ERROR)",
        ["Error: a.txt: no such file", True],
        True,
    ]


def ask(url: str, data: bytes | None = None) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_production_exposes_no_reset_step_or_state(edge: Edge) -> None:
    url = base(edge, edge.tools_key)

    assert ask(f"{url}/reset", b"{}")[0] == 404
    assert ask(f"{url}/step", b'{"action": {"tool": "list_dir"}}')[0] == 404
    assert ask(f"{url}/state")[0] == 404
    assert not {"/reset", "/step", "/state"} & set(ask(f"{url}/openapi.json")[1]["paths"])
    with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
        assert json.loads(answer.read()) == {"status": "healthy"}


async def talk(url: str, *messages: str | bytes) -> list[Any]:
    async with websockets.connect(url.replace("http://", "ws://") + "/ws") as socket:
        answers = []
        for message in messages:
            await socket.send(message)
            answers.append(json.loads(await socket.recv()))
        return answers


@pytest.mark.parametrize("kind", ["reset", "step", "state"])
async def test_production_s_socket_knows_tools_alone(edge: Edge, kind: str) -> None:
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    messages = (json.dumps({"type": kind, "data": {}}), json.dumps({"type": "mcp", "data": call}))

    refused, answered = await talk(base(edge, edge.tools_key), *messages)

    assert refused["data"]["code"] == "UNKNOWN_TYPE"
    assert len(answered["data"]["result"]["tools"]) == 14


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("{", "INVALID_JSON"),
        ("[" * 100_000, "INVALID_JSON"),
        ("[]", "UNKNOWN_TYPE"),
        ('{"type": "nothing"}', "UNKNOWN_TYPE"),
        ('{"type": "reset", "data": {"seed": -1}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": []}', "VALIDATION_ERROR"),
        ('{"type": "step"}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"tool": 1}}', "VALIDATION_ERROR"),
    ],
)
async def test_a_message_that_makes_no_sense_gets_its_code(
    edge: Edge, message: str, code: str
) -> None:
    (answer,) = await talk(base(edge, edge.key), message)

    assert (answer["type"], answer["data"]["code"]) == ("error", code)


async def test_a_binary_message_is_refused_and_the_next_one_answered(edge: Edge) -> None:
    refused, answered = await talk(base(edge, edge.key), b'{"type": "state"}', '{"type": "state"}')

    assert (refused["data"]["code"], answered["type"]) == ("INVALID_JSON", "state")
    assert "binary" in refused["data"]["message"]


async def test_a_fifth_session_is_told_that_there_is_no_room(edge: Edge) -> None:
    url = base(edge, edge.key)
    waiting = [asyncio.Event() for _ in range(4)]
    leave = asyncio.Event()

    async def stay(begun: asyncio.Event) -> None:
        async with websockets.connect(url.replace("http://", "ws://") + "/ws") as socket:
            await socket.send('{"type": "reset"}')
            assert json.loads(await socket.recv())["type"] == "observation"
            begun.set()
            await leave.wait()

    async with asyncio.TaskGroup() as group:
        for begun in waiting:
            group.create_task(stay(begun))
            await begun.wait()
        async with websockets.connect(url.replace("http://", "ws://") + "/ws") as socket:
            answer = json.loads(await socket.recv())
        leave.set()

    assert answer["data"]["code"] == "CAPACITY_REACHED"


async def test_a_pool_without_such_a_template_is_said_so(edge: Edge) -> None:
    url = f"{edge.url}/openenv/{edge.key}/ruby"
    async with websockets.connect(url.replace("http://", "ws://") + "/ws") as socket:
        answer = json.loads(await socket.recv())

    assert answer["data"]["code"] == "FACTORY_ERROR"
    assert "template" in answer["data"]["message"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{}", -32600),
        (b"[]", -32600),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call"}', -32602),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "reset"}', -32601),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "env/grade"}', -32601),
    ],
)
def test_a_json_rpc_message_that_is_none_gets_its_code(edge: Edge, body: bytes, code: int) -> None:
    status, answer = ask(f"{base(edge, edge.tools_key)}/mcp", body)

    assert (status, answer["error"]["code"]) == (200, code)


def test_one_call_over_http_has_an_environment_of_its_own(edge: Edge) -> None:
    url = base(edge, edge.key)

    status, answer = ask(f"{url}/step", b'{"action": {"tool": "list_dir", "arguments": {}}}')

    assert (status, answer["done"], answer["reward"]) == (200, False, None)
    assert ask(f"{url}/reset", b'{"seed": 1}')[1]["observation"]["tools"]
    assert ask(f"{url}/state")[1] == {"episode_id": None, "step_count": 0}
    assert ask(f"{url}/step", b'{"action": 1}')[0] == 422
    assert ask(f"{url}/step", b"{")[0] == 400


def test_a_step_over_http_may_be_given_a_time_and_a_name(edge: Edge) -> None:
    slow = {"tool": "run_terminal", "arguments": {"command": "sleep 600"}}
    late = {"action": slow, "timeout_s": 5}
    named = {"action": {"tool": "list_dir"}, "request_id": "é 1", "timeout_s": 600}
    url = f"{base(edge, edge.key)}/step"

    status, answer = ask(url, json.dumps(late).encode())
    request = urllib.request.Request(url, json.dumps(named).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answered:
        assert answered.headers["x-request-id"] == "%C3%A9%201"

    assert (status, answer["detail"]["code"]) == (500, "EXECUTION_ERROR")
    assert answer["detail"]["message"] == "no answer in 5 s"
