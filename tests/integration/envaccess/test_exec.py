"""Programs that a lease's controller runs beside the agent's calls."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from etude.envserver.drivers.programs import OutputPiece, OutputStream
from etude.envserver.host.access_service import _pieces
from etude.v1 import environment_access_pb2 as pb2

Door = Any  # the fixture's class lives in conftest, which test modules cannot import
Refusal = Callable[[Any], Any]


def stdin(data: bytes) -> pb2.ExecRequest:
    return pb2.ExecRequest(stdin=data)


async def rest(call: Any) -> list[pb2.ExecResponse]:
    """What is still to come; a call that was read from cannot be iterated over any more."""
    news = []
    while isinstance(piece := await call.read(), pb2.ExecResponse):
        news.append(piece)
    return news


async def test_a_program_sees_the_workspace_and_both_streams_stay_apart(door: Door) -> None:
    said = await door.run("cat notes.txt; echo oops >&2; exit 3")

    assert (said.out, said.err, said.exit.exit_code) == (b"first\n", b"oops\n", 3)
    assert said.exit.ended_for == ""


async def test_input_arrives_and_ends_with_the_clients_half_of_the_stream(door: Door) -> None:
    said = await door.run("tr a-z A-Z", stdin(b"one "), stdin(b"two\n"))

    assert (said.out, said.exit.exit_code) == (b"ONE TWO\n", 0)


async def test_input_ends_where_the_client_says_so_though_the_stream_goes_on(door: Door) -> None:
    close = pb2.ExecRequest(close_stdin=pb2.CloseStdin())

    said = await door.run("wc -c", stdin(b"abc"), close, is_open=True)

    assert said.out.strip() == b"3"


async def test_output_comes_while_the_program_runs(door: Door) -> None:
    call = door.exec()
    opened = pb2.ExecOpen(**door.key, shell="read a; echo got $a; read b; echo got $b")
    await call.write(pb2.ExecRequest(open=opened))
    assert (await call.read()).HasField("started")

    for word in (b"1", b"2"):
        await call.write(stdin(word + b"\n"))
        assert (await call.read()).stdout == b"got " + word + b"\n"
    assert (await call.read()).exit.exit_code == 0


async def test_more_output_than_any_buffer_holds_arrives_whole(door: Door) -> None:
    said = await door.run("head -c 20000000 /dev/zero")

    assert (len(said.out), said.exit.exit_code) == (20_000_000, 0)


async def test_a_signal_reaches_the_program_and_its_children(door: Door) -> None:
    call = door.exec()
    # It says so from inside: a shell that is about to start a child may keep the signal to itself.
    opened = pb2.ExecOpen(
        **door.key, shell="trap 'echo caught; exit 7' INT; (echo up; exec sleep 60) | cat"
    )
    await call.write(pb2.ExecRequest(open=opened))
    await call.read()
    assert (await call.read()).stdout == b"up\n"

    await call.write(pb2.ExecRequest(signal=2))

    news = await rest(call)
    assert b"".join(n.stdout for n in news) == b"caught\n"
    assert news[-1].exit.exit_code == 7


async def test_a_program_ends_with_its_time(door: Door) -> None:
    said = await door.run("sleep 60", timeout_seconds=1)

    assert (said.exit.ended_for, said.exit.exit_code) == ("time", 143)


async def test_a_client_that_goes_away_takes_its_program_with_it(door: Door) -> None:
    call = door.exec()
    shell = "while sleep 0.05; do echo x >> beat; done"
    await call.write(pb2.ExecRequest(open=pb2.ExecOpen(**door.key, shell=shell)))
    await call.read()
    call.cancel()

    sizes: list[int] = []
    async with asyncio.timeout(60):
        while len(sizes) < 3 or len(set(sizes[-3:])) > 1:
            await asyncio.sleep(0.3)
            sizes += [entry.size for entry in await door.list() if entry.path == "beat"] or [0]


async def test_a_lease_that_ends_takes_its_programs_with_it(door: Door) -> None:
    call = door.exec()
    await call.write(pb2.ExecRequest(open=pb2.ExecOpen(**door.key, shell="sleep 60")))
    await call.read()

    await door.close()

    news = await rest(call)
    assert news[-1].exit.exit_code == 137


async def test_a_terminal_is_one_with_the_size_that_was_asked_for(door: Door) -> None:
    size = pb2.TerminalSize(rows=33, columns=101)
    said = await door.run("tty -s && stty size; echo err >&2", terminal=size)

    assert (said.out, said.err) == (b"33 101\r\nerr\r\n", b"")


async def test_a_terminal_passes_ctrl_c_on_and_takes_a_new_size(door: Door) -> None:
    call = door.exec()
    size = pb2.TerminalSize(rows=24, columns=80)
    shell = "trap 'stty size; exit 5' INT; echo up; while :; do sleep 1; done"
    await call.write(pb2.ExecRequest(open=pb2.ExecOpen(**door.key, shell=shell, terminal=size)))
    await call.read()
    assert (await call.read()).stdout == b"up\r\n"
    await call.write(pb2.ExecRequest(resize=pb2.TerminalSize(rows=50, columns=132)))
    await call.write(stdin(b"\x03"))

    news = await rest(call)

    assert b"50 132" in b"".join(n.stdout for n in news)
    assert news[-1].exit.exit_code == 5


async def test_words_of_a_program_are_not_the_shells(door: Door) -> None:
    argv = pb2.ArgumentList(arguments=["echo", "$HOME", "a  b;", "*"])
    call = door.exec()
    await call.write(pb2.ExecRequest(open=pb2.ExecOpen(**door.key, argv=argv)))
    await call.done_writing()

    assert b"".join([n.stdout async for n in call]) == b"$HOME a  b; *\n"


async def test_variables_and_folder_are_the_clients(door: Door) -> None:
    said = await door.run("pwd; echo $COLOUR $CI", cwd="shop", env={"COLOUR": "blue"})

    assert said.out == b"/workspace/shop\nblue 1\n"


@pytest.mark.parametrize(
    ("shell", "fields", "code", "words"),
    [
        ("no-such-program", {}, 127, b"not found"),
        ("true", {"cwd": "missing"}, 127, b"missing: No such file or directory\n"),
        ("true", {"cwd": "notes.txt"}, 126, b"notes.txt: Not a directory\n"),
    ],
)
async def test_a_program_that_cannot_start_says_why(
    door: Door, shell: str, fields: dict[str, str], code: int, words: bytes
) -> None:
    said = await door.run(shell, **fields)

    assert said.exit.exit_code == code
    assert words in said.err


async def test_what_a_program_changes_counts_in_the_diff_and_the_agent_sees_it(door: Door) -> None:
    assert "no such file" in await door.turn("1", "read_file", '{"path": "new.txt"}')
    await door.run("echo made > new.txt; rm notes.txt")

    assert "made" in await door.turn("2", "read_file", '{"path": "new.txt"}')
    diff = await door.diff()
    assert [(file.path, file.content) for file in diff.written] == [("new.txt", b"made\n")]
    assert list(diff.deleted) == ["notes.txt"]


async def test_a_test_run_beside_a_program_is_not_kept_for_others(door: Door) -> None:
    run = json.dumps({"command": "python3 p.py"})
    await door.write("p.py", b"print(open('notes.txt').read())")
    assert "first" in await door.turn("1", "run_terminal", run)
    call = door.exec()
    shell = "read a; echo second > notes.txt; echo ok; read b"
    await call.write(pb2.ExecRequest(open=pb2.ExecOpen(**door.key, shell=shell)))
    await call.read()
    assert "first" in await door.turn("2", "run_terminal", run)

    await call.write(stdin(b"go\n"))
    assert (await call.read()).stdout == b"ok\n"

    assert "second" in await door.turn("3", "run_terminal", run)


async def test_the_agents_token_opens_nothing(door: Door, refusal: Refusal) -> None:
    door.lease.control_token = door.lease.agent_token

    for attempt in (door.run("true"), door.read("notes.txt"), door.write("x", b""), door.list()):
        assert await refusal(attempt) is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize(
    "fields",
    [
        {"cwd": ".."},
        {"cwd": "/etc"},
        {"env": {"A=B": "c"}},
        {"env": {"": "c"}},
        {"env": {"A": "\0"}},
        {"env": {"A": "x" * 70_000}},
        {"timeout_seconds": 86_401},
        {"terminal": pb2.TerminalSize(rows=0, columns=80)},
        {"terminal": pb2.TerminalSize(rows=24, columns=100_000)},
    ],
)
async def test_a_program_that_makes_no_sense_is_refused(
    door: Door, refusal: Refusal, fields: dict[str, Any]
) -> None:
    assert await refusal(door.run("true", **fields)) is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "step",
    [
        pb2.ExecRequest(signal=99),
        pb2.ExecRequest(signal=-1),
        pb2.ExecRequest(open=pb2.ExecOpen()),
        pb2.ExecRequest(),
    ],
)
async def test_a_step_that_makes_no_sense_ends_the_call(
    door: Door, refusal: Refusal, step: pb2.ExecRequest
) -> None:
    running = door.run("sleep 60", step, is_open=True)

    assert await refusal(running) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_seventeenth_program_is_refused_until_one_has_ended(
    door: Door, refusal: Refusal
) -> None:
    calls = [door.exec() for _ in range(16)]
    for call in calls:
        await call.write(pb2.ExecRequest(open=pb2.ExecOpen(**door.key, shell="read a")))
        await call.read()

    assert await refusal(door.run("true")) is grpc.StatusCode.RESOURCE_EXHAUSTED

    await calls[0].done_writing()
    assert (await calls[0].read()).HasField("exit")
    assert (await door.run("echo again")).out == b"again\n"


async def test_a_program_sees_nothing_of_the_host(door: Door) -> None:
    said = await door.run(
        "ls / ; cat /proc/1/environ; ls /.etude; ls /proc | grep -c '^[0-9]'; id -u; ls /root"
    )

    assert b"work" not in said.out.replace(b"workspace", b"")
    assert said.out.split()[-1] == b"1000"


async def test_more_input_in_a_message_than_the_wire_has_ends_the_program(
    door: Door, refusal: Refusal
) -> None:
    most = 1 << 20

    assert (await door.run("wc -c", stdin(b"x" * most))).out.strip() == b"%d" % most
    refused = door.run("sleep 600", stdin(b"x" * (most + 1)))
    assert await refusal(refused) is grpc.StatusCode.INVALID_ARGUMENT


def test_output_is_cut_for_the_wire_whatever_a_driver_reads_at_once() -> None:
    piece = OutputPiece(OutputStream.ERR, b"x" * (5 << 19))

    sent = list(_pieces(piece))

    assert [len(each.stderr) for each in sent] == [1 << 20, 1 << 20, 1 << 19]
