"""E2B's own client against our edge: the scripts of its users, unchanged."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import e2b
import pytest

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "use-a-sandbox.md"
Edge = Any  # the fixture's class lives in conftest, which test modules cannot import


@pytest.fixture(autouse=True)
def settings(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user sets instead of an account."""
    monkeypatch.setenv("E2B_API_KEY", edge.key)
    monkeypatch.setenv("E2B_API_URL", edge.url)
    monkeypatch.setenv("E2B_SANDBOX_URL", edge.url)


@pytest.fixture
def sandbox() -> Iterator[e2b.Sandbox]:
    made = e2b.Sandbox.create("python", timeout=300)
    yield made
    made.kill()


def test_create_run_files_kill() -> None:
    sandbox = e2b.Sandbox.create("python", timeout=300, envs={"NAME": "world"})
    assert sandbox.is_running()

    done = sandbox.commands.run("echo hello $NAME; echo oops >&2; pwd")
    assert (done.stdout, done.stderr, done.exit_code) == ("hello world\n/workspace\n", "oops\n", 0)
    sandbox.files.write("/home/user/hello.py", "print(6 * 7)")
    assert sandbox.files.read("/home/user/hello.py") == "print(6 * 7)"
    assert sandbox.commands.run("python3 /home/user/hello.py").stdout == "42\n"
    assert [entry.name for entry in sandbox.files.list("/home/user")] == ["hello.py"]

    assert sandbox.kill()
    assert not sandbox.is_running()
    assert not sandbox.kill()


def test_the_script_of_the_page_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    script = re.findall(r"```python\n(import e2b.*?)```", PAGE.read_text(), re.DOTALL)

    exec(compile(script[0], "page", "exec"), {})

    assert capsys.readouterr().out == "42\n"


async def test_the_asynchronous_client_too() -> None:
    sandbox = await e2b.AsyncSandbox.create("python", timeout=300)
    pieces: list[str] = []

    done = await sandbox.commands.run("echo one; sleep 0.1; echo two", on_stdout=pieces.append)

    assert (done.stdout, "".join(pieces)) == ("one\ntwo\n", "one\ntwo\n")
    assert await sandbox.kill()


def test_a_command_that_fails_says_how(sandbox: e2b.Sandbox) -> None:
    with pytest.raises(e2b.CommandExitException) as caught:
        sandbox.commands.run("echo out; echo err >&2; exit 3")

    assert (caught.value.exit_code, caught.value.stdout, caught.value.stderr) == (
        *(3, "out\n", "err\n"),
    )


def test_a_command_in_the_background_is_fed_found_again_and_killed(sandbox: e2b.Sandbox) -> None:
    shell = "while read word; do echo got $word; done; echo end; sleep 60"
    handle = sandbox.commands.run(shell, background=True, stdin=True)
    sandbox.commands.send_stdin(handle.pid, "first\n")
    assert next(iter(handle))[0] == "got first\n"
    handle.disconnect()

    again = sandbox.commands.connect(handle.pid)
    sandbox.commands.send_stdin(again.pid, "second\n")
    assert next(iter(again))[0] == "got second\n"
    assert [process.pid for process in sandbox.commands.list()] == [handle.pid]
    sandbox.commands.close_stdin(again.pid)
    assert next(iter(again))[0] == "end\n"
    assert sandbox.commands.kill(handle.pid)
    with pytest.raises(e2b.CommandExitException) as caught:
        again.wait()
    assert caught.value.exit_code == 137

    assert not sandbox.commands.kill(handle.pid)


def test_a_command_ends_with_its_time(sandbox: e2b.Sandbox) -> None:
    with pytest.raises(e2b.TimeoutException):
        sandbox.commands.run("sleep 60", timeout=1)


def test_a_terminal(sandbox: e2b.Sandbox) -> None:
    seen = bytearray()
    terminal = sandbox.pty.create(e2b.PtySize(rows=33, cols=101))
    sandbox.pty.send_stdin(terminal.pid, b"stty size; exit 7\n")

    with pytest.raises(e2b.CommandExitException) as caught:
        terminal.wait(on_pty=seen.extend)

    assert caught.value.exit_code == 7
    assert b"33 101" in seen


def test_files_are_made_moved_found_and_removed(sandbox: e2b.Sandbox) -> None:
    data = bytes(range(256)) * 8_000
    files = sandbox.files
    assert files.make_dir("a/b")
    assert not files.make_dir("a/b")

    assert files.write("a/b/data.bin", data).path == "/home/user/a/b/data.bin"
    assert bytes(files.read("a/b/data.bin", format="bytes")) == data
    assert files.get_info("a/b/data.bin").size == len(data)
    assert files.rename("a/b/data.bin", "/home/user/c.bin").path == "/home/user/c.bin"
    assert (files.exists("a/b/data.bin"), files.exists("c.bin")) == (False, True)
    files.write_files([{"path": "x/1", "data": "one"}, {"path": "x/2", "data": b"two"}])
    found = [entry.path for entry in files.list("/home/user", depth=3)]
    assert found == [f"/home/user/{name}" for name in ("a", "a/b", "c.bin", "x", "x/1", "x/2")]
    files.remove("x")
    assert not files.exists("x")


def test_a_listing_stops_at_its_limit_whatever_folders_the_entries_are_in(
    sandbox: e2b.Sandbox,
) -> None:
    sandbox.commands.run("for n in d e; do mkdir $n; (cd $n; seq 6000 | xargs touch); done")

    assert len(sandbox.files.list("d", depth=1)) == 6000
    with pytest.raises(e2b.SandboxException, match="holds more than"):
        sandbox.files.list("/home/user", depth=2)


def test_a_file_can_be_sent_as_a_stream(sandbox: e2b.Sandbox, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"x" * 3_000_000)

    with (tmp_path / "big").open("rb") as file:
        sandbox.files.write("big", file, gzip=True)

    assert sandbox.commands.run("wc -c < big").stdout == "3000000\n"


def test_what_is_not_there_is_not_found(sandbox: e2b.Sandbox) -> None:
    for attempt in (sandbox.files.read, sandbox.files.list, sandbox.files.remove):
        with pytest.raises(e2b.NotFoundException):
            attempt("missing")


@pytest.mark.parametrize("path", ["/etc/passwd", "../../etc/passwd", "/home/user/../../etc"])
def test_no_path_leads_out_of_the_sandbox(sandbox: e2b.Sandbox, path: str) -> None:
    with pytest.raises(e2b.InvalidArgumentException):
        sandbox.files.read(path)
    with pytest.raises(e2b.InvalidArgumentException):
        sandbox.files.write(path, "x")


def test_sandboxes_are_listed_by_what_their_maker_noted(sandbox: e2b.Sandbox) -> None:
    noted = e2b.Sandbox.create("python", metadata={"job": "a b&c"})

    query = e2b.SandboxQuery(metadata={"job": "a b&c"})
    assert [s.sandbox_id for s in e2b.Sandbox.list(query).next_items()] == [noted.sandbox_id]
    first = e2b.Sandbox.list(limit=1)
    ids = [s.sandbox_id for s in first.next_items()]
    assert first.has_next
    ids += [s.sandbox_id for s in first.next_items()]
    assert set(ids) == {sandbox.sandbox_id, noted.sandbox_id}
    assert noted.get_info().metadata == {"job": "a b&c"}
    assert (noted.get_info().cpu_count, noted.get_info().memory_mb) == (1, 512)
    noted.kill()


def test_a_sandbox_can_be_entered_again_and_kept_longer(sandbox: e2b.Sandbox) -> None:
    before = sandbox.get_info().end_at
    sandbox.files.write("f", "kept")

    same = e2b.Sandbox.connect(sandbox.sandbox_id)
    same.set_timeout(3600)

    assert same.files.read("f") == "kept"
    assert (sandbox.get_info().end_at - before).total_seconds() > 3000


def test_a_sandbox_ends_with_its_time() -> None:
    sandbox = e2b.Sandbox.create("python", timeout=1)

    while sandbox.is_running():
        pass

    with pytest.raises(e2b.SandboxException):
        sandbox.commands.run("true")


def test_a_paused_sandbox_keeps_its_files_and_waits(sandbox: e2b.Sandbox) -> None:
    sandbox.files.write("f", "kept")

    assert sandbox.pause()
    assert not sandbox.pause()
    assert sandbox.get_info().state == e2b.SandboxState.PAUSED
    with pytest.raises(e2b.SandboxException):
        sandbox.commands.run("true")

    assert e2b.Sandbox.connect(sandbox.sandbox_id).files.read("f") == "kept"
    assert sandbox.get_info().state == e2b.SandboxState.RUNNING


def test_somebody_else_s_sandbox_is_unknown(sandbox: e2b.Sandbox, edge: Edge) -> None:
    for attempt in (e2b.Sandbox.connect, e2b.Sandbox.get_info):
        with pytest.raises(e2b.NotFoundException):
            attempt(sandbox.sandbox_id, api_key=edge.other_key)
    assert not e2b.Sandbox.kill(sandbox.sandbox_id, api_key=edge.other_key)
    assert e2b.Sandbox.list(api_key=edge.other_key).next_items() == []
    assert sandbox.is_running()


@pytest.mark.parametrize("which", ["wrong", "tools_key"])
def test_a_key_that_may_not_is_refused(edge: Edge, which: str) -> None:
    key = getattr(edge, which, "etude_wrong")

    with pytest.raises(e2b.AuthenticationException):
        e2b.Sandbox.create("python", api_key=key)


def test_a_template_that_is_not_there_is_refused() -> None:
    with pytest.raises(e2b.SandboxException, match="template"):
        e2b.Sandbox.create("ruby")


def test_what_a_sandbox_here_cannot_have_is_said() -> None:
    with pytest.raises(e2b.SandboxException, match="no network"):
        e2b.Sandbox.create("python", allow_internet_access=True)


def test_a_fifth_sandbox_is_refused_for_now() -> None:
    made = [e2b.Sandbox.create("python") for _ in range(4)]

    with pytest.raises(e2b.RateLimitException):
        e2b.Sandbox.create("python", retries=0)

    for each in made:
        each.kill()


def test_a_request_that_is_repeated_makes_one_sandbox() -> None:
    one = e2b.Sandbox.create("python", idempotency_key="same-key")
    other = e2b.Sandbox.create("python", idempotency_key="same-key")

    assert one.sandbox_id == other.sandbox_id
    one.kill()


def test_the_client_was_told_nothing_of_the_host(edge: Edge, sandbox: e2b.Sandbox) -> None:
    environment = sandbox.commands.run("env; ls /; cat /proc/*/cmdline | tr '\\0' ' '").stdout

    assert str(edge.folder) not in environment
