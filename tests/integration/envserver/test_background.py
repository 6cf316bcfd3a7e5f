"""Background commands of a lease on the process driver, from the policy's side."""

import asyncio
import json
import time
from pathlib import Path

from etude.agent.tool_calls import ParsedCall
from etude.agent.tools.base import ToolOutcome
from etude.agent.toolsets import run_calls, toolset
from etude.agent.workspace import ExecResult
from etude.envserver.drivers.base import Sandbox
from etude.envserver.drivers.process.driver import ProcessDriver
from etude.envserver.host.host import Host
from etude.envserver.host.workspace_sources import WorkspaceSources
from etude.envserver.storage import folders
from etude.envserver.storage.trees import File
from etude.v1 import environments_pb2

TREE = {"notes.txt": File(b"one\n")}
PATIENCE_S = 60


async def begun(driver: ProcessDriver, name: str) -> Sandbox:
    folder = driver.leases / name
    folder.mkdir()

    async def run(command: str, timeout_s: float) -> ExecResult:
        done = await made.run(command, timeout_s)
        return ExecResult(output=done.output, exit_code=done.exit_code)

    made = driver.sandbox(folder, run, template="t")
    await made.initialize(TREE)
    return made


async def call(sandbox: Sandbox, name: str, **arguments: object) -> ToolOutcome:
    calls = [ParsedCall(name=name, arguments=arguments)]
    (done,) = await run_calls(toolset("Standard"), sandbox.workspace, calls)
    return done


async def start(sandbox: Sandbox, command: str, **more: object) -> str:
    return (
        await call(sandbox, "run_terminal", command=command, is_background=True, **more)
    ).content


async def ask(sandbox: Sandbox, op: str, job: int = 1, **more: object) -> str:
    return (await call(sandbox, "terminal_io", job=job, op=op, **more)).content


async def printed(sandbox: Sandbox, text: str, job: int = 1) -> None:
    """Wait until a job has said something."""
    async with asyncio.timeout(PATIENCE_S):
        while text not in await ask(sandbox, "read", job=job):
            await ask(sandbox, "await", job=job, timeout=1)


async def test_a_server_in_the_background_is_talked_to_and_ended(driver: ProcessDriver) -> None:
    sandbox = await begun(driver, "a")
    told = await start(sandbox, "while read line; do echo $line >> notes.txt; echo ok; done")
    assert told == "Job 1 runs in the background: see terminal_io."
    assert sandbox.workspace.jobs.may_run
    assert await ask(sandbox, "stdin", input="two") == "Sent 4 bytes to job 1."
    await printed(sandbox, "ok")
    assert (await call(sandbox, "read_file", path="notes.txt")).content == "1|one\n2|two"
    assert await ask(sandbox, "read", offset=3) == "[job 1 runs; 3 bytes of output]"
    assert await ask(sandbox, "stdin", end_input=True) == (
        "Sent 0 bytes to job 1, and ended its input."
    )
    assert await ask(sandbox, "await", timeout=PATIENCE_S) == (
        "ok\n[job 1 has ended with exit code 0; 3 bytes of output]"
    )
    await sandbox.close()


async def test_jobs_of_other_leases_do_not_exist(driver: ProcessDriver) -> None:
    one, other = await begun(driver, "a"), await begun(driver, "b")
    await start(one, "sleep 300")
    assert await ask(other, "kill") == "Error: job 1: there is no such job"
    assert await ask(one, "read") == "[job 1 runs; 0 bytes of output]"
    await one.close()


async def test_jobs_end_with_their_lease(driver: ProcessDriver) -> None:
    sandbox = await begun(driver, "a")
    await start(sandbox, "while :; do date +%s%N > beat; sleep 0.01; done")
    beat = driver.leases / "a" / "workspace" / "beat"
    async with asyncio.timeout(PATIENCE_S):
        while not beat.exists():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)
    await sandbox.close()
    assert not sandbox.workspace.jobs.may_run
    last = beat.read_bytes()
    await asyncio.sleep(0.2)
    assert beat.read_bytes() == last


async def test_a_snapshot_holds_what_jobs_have_printed_and_not_the_jobs(
    driver: ProcessDriver, tmp_path: Path
) -> None:
    sandbox = await begun(driver, "a")
    await start(sandbox, "echo early")
    await ask(sandbox, "await", timeout=PATIENCE_S)
    await start(sandbox, "echo up; sleep 300")
    await printed(sandbox, "up", job=2)
    (tmp_path / "saved").mkdir()
    saved = await sandbox.save(tmp_path / "saved", folders.DIFF)
    await start(sandbox, "echo late")
    await ask(sandbox, "await", job=3, timeout=PATIENCE_S)
    await sandbox.restore(tmp_path / "saved", saved)
    assert sandbox.is_intact
    assert (
        await ask(sandbox, "read") == "early\n[job 1 has ended with exit code 0; 6 bytes of output]"
    )
    assert await ask(sandbox, "read", job=2) == (
        "up\n[job 2 has ended with exit code 137; 3 bytes of output]"
    )
    assert await ask(sandbox, "read", job=3) == "Error: job 3: there is no such job"
    assert (await start(sandbox, "true")).startswith("Job 3 ")
    await sandbox.close()


async def test_a_sandbox_whose_jobs_died_with_the_server_is_not_whole(
    driver: ProcessDriver,
) -> None:
    sandbox = await begun(driver, "a")
    await start(sandbox, "sleep 300")
    assert sandbox.is_intact
    await driver.stop()
    await sandbox.close()
    assert not sandbox.is_intact
    successor = driver.sandbox(driver.leases / "a", _never, template="t")
    assert not successor.is_intact


async def _never(command: str, timeout_s: float) -> ExecResult:
    raise AssertionError((command, timeout_s))


_SERVER = (
    "import http.server as h\n"
    "class Hello(h.BaseHTTPRequestHandler):\n"
    "    def do_GET(self):\n"
    "        self.send_response(200)\n"
    "        self.end_headers()\n"
    "        self.wfile.write(b'hello')\n"
    "    def log_message(self, *args):\n"
    "        pass\n"
    "server = h.HTTPServer(('127.0.0.1', 8000), Hello)\n"
    "print('serving', flush=True)\n"
    "server.serve_forever()\n"
)
_GET = (
    "python3 -c \"import urllib.request as r; print(r.urlopen('http://127.0.0.1:8000').read())\""
    " 2>&1 | tail -n 1"
)


async def test_commands_reach_a_server_of_their_lease_and_no_other(driver: ProcessDriver) -> None:
    one, other = await begun(driver, "a"), await begun(driver, "b")
    for sandbox in (one, other):
        await call(sandbox, "write_file", path="serve.py", content=_SERVER)
    await start(one, "python3 serve.py")
    await printed(one, "serving")
    assert (await call(one, "run_terminal", command=_GET)).content == "b'hello'"
    assert "refused" in (await call(other, "run_terminal", command=_GET)).content
    await start(one, f"{_GET}; sleep 300")
    await printed(one, "hello", job=2)
    await ask(one, "kill", job=1)
    assert "refused" in (await call(one, "run_terminal", command=_GET)).content
    await ask(one, "kill", job=2)
    await start(one, "python3 serve.py")
    await printed(one, "serving", job=3)
    assert (await call(one, "run_terminal", command=_GET)).content == "b'hello'"
    await one.close()
    await other.close()


async def test_a_host_takes_over_a_lease_whose_jobs_have_ended_and_no_other(
    driver: ProcessDriver, source: str, tmp_path: Path
) -> None:
    def node() -> Host:
        return Host(
            driver=driver,
            sources=WorkspaceSources(tmp_path / "sources"),
            slots=4,
            templates={"t"},
            refused={},
            endpoint="here:1",
        )

    async def turn(lease: str, number: int, name: str, **arguments: object) -> str:
        called = environments_pb2.ToolCall(
            call_id=str(number), name=name, arguments_json=json.dumps(arguments)
        )
        return (await dead.find(lease).run_turn([called]))[0].content.decode()

    dead = node()
    expires = round(1000 * (time.time() + PATIENCE_S))
    leases = [
        environments_pb2.HeldLease(
            lease=environments_pb2.Lease(lease_id=name, expires_unix_ms=expires), index=index
        )
        for index, name in enumerate(("ended", "running"))
    ]
    place = environments_pb2.WorkspaceSource(uri=source)
    await dead.open(
        environments_pb2.OpenEnvironmentsRequest(
            leases=leases, template="t", workspace=place, toolset="Standard"
        )
    )
    for lease, command in (("ended", "echo over"), ("running", "echo up; sleep 300")):
        await turn(lease, 1, "run_terminal", command=command, is_background=True)
        await turn(lease, 2, "terminal_io", job=1, op="await", timeout=2)
    # As its death would: the server, and with it every command, ends.
    await driver.stop()

    successor = node()
    assert await successor.take_over() == (1, 1)
    dead = successor
    assert await turn("ended", 3, "terminal_io", job=1, op="read") == (
        "over\n[job 1 has ended with exit code 0; 5 bytes of output]"
    )
    await successor.close(["ended"])
