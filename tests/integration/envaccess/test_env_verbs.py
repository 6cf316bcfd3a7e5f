"""`etude env` as a person types it, against a broker and a node of its own."""

import fcntl
import json
import os
import pty
import re
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import JsonValue
from tests.support import warm_etude

from etude.common.run_folder.state import LocalPod, LocalState, write_state

Processes = Any  # the fixture's class lives in conftest, which test modules cannot import
CODE = "from etude.cli.main import main; main()"
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "use-a-sandbox.md"

Etude = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def etude(tmp_path: Path) -> Etude:
    def run(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
        return warm_etude.etude("env", *words, text=text, cwd=tmp_path, env=variables(tmp_path))

    return run


def variables(folder: Path) -> dict[str, str]:
    return {"ETUDE_ENVIRONMENTS": str(folder / "kept"), "COLUMNS": "200", "TERM": "xterm"}


@pytest.fixture
def name(etude: Etude, processes: Processes) -> Iterator[str]:
    done = etude("create", processes.broker, "--template", "python")
    assert done.returncode == 0, done.stderr
    made = done.stdout.strip()
    yield made
    etude("rm", made)


def test_a_command_gets_its_input_and_gives_its_output_and_exit_code(
    etude: Etude, name: str
) -> None:
    done = etude("exec", name, "sh", "-c", "cat; echo oops >&2; exit 4", text="piped\n")

    assert (done.stdout, done.stderr, done.returncode) == ("piped\n", "oops\n", 4)


def test_files_stay_between_commands_and_options_reach_them(etude: Etude, name: str) -> None:
    etude("exec", name, "mkdir", "-p", "a/b")

    done = etude("exec", "--cwd", "a/b", "--env", "X=1", name, "sh", "-c", "pwd; echo $X")

    assert done.stdout == "/workspace/a/b\n1\n"


def test_an_environment_begins_with_the_folder_that_was_named(
    etude: Etude, processes: Processes, tmp_path: Path
) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "hello.py").write_text("print('hello')\n")
    place = ("create", processes.broker, "--template", "python", "--workspace", "project")
    name = etude(*place).stdout.strip()

    assert etude("exec", name[:20], "python3", "hello.py").stdout == "hello\n"
    assert etude("rm", name).returncode == 0


def test_what_was_ended_is_gone(etude: Etude, processes: Processes) -> None:
    name = etude("create", processes.broker, "--template", "python").stdout.strip()
    assert name in etude("ls").stdout

    assert etude("rm", name).returncode == 0

    assert etude("ls", "--json").stdout == ""
    gone = etude("exec", name, "true")
    assert gone.returncode == 3
    assert "fix: etude env ls" in gone.stderr


def test_a_lease_that_ended_elsewhere_is_said_to_be_gone(
    etude: Etude, name: str, tmp_path: Path
) -> None:
    kept = tmp_path / "kept" / f"{name}.json"
    text = kept.read_text()
    etude("rm", name)
    kept.write_text(text)

    done = etude("exec", name, "true")

    assert done.returncode == 3
    assert "Traceback" not in done.stderr


def test_nobody_else_can_read_the_tokens(name: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept"

    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    assert stat.S_IMODE((kept / f"{name}.json").stat().st_mode) == 0o600


def test_the_list_says_where_each_environment_is(etude: Etude, name: str) -> None:
    (row,) = (json.loads(line) for line in etude("ls", "--json").stdout.splitlines())

    assert (row["name"], row["template"], row["driver"]) == (name, "python", "process")
    assert row["is_yours"]
    assert 3000 < row["ends_in_s"] <= 3600


def test_a_shell_without_a_terminal_goes_line_by_line(etude: Etude, name: str) -> None:
    done = etude("shell", name, text="echo made > f\ncat f\nexit 5\n")

    assert (done.stdout, done.returncode) == ("made\n", 5)


def test_a_shell_on_a_terminal_passes_keys_on_and_gives_the_terminal_back(
    name: str, tmp_path: Path
) -> None:
    process, terminal = pty.fork()
    if process == 0:
        os.execve(
            sys.executable,
            [sys.executable, "-c", CODE, "env", "shell", name],
            {**variables(tmp_path), "PATH": os.environ["PATH"]},
        )
    read_until(terminal, b"$ ")
    os.write(terminal, b"echo $((40 + 2))\r")
    read_until(terminal, b"42\r\n")
    # One foreground process: between two commands, a shell that begins the second one keeps Ctrl-C.
    os.write(terminal, b"sh -c 'echo u\"\"p; exec sleep 600'\r")
    read_until(terminal, b"up\r\n")
    os.write(terminal, b"\x03")
    read_until(terminal, b"$ ")
    os.write(terminal, b"exit 7\r")

    read_until(terminal, b"exit\r\n")

    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 7


def read_until(terminal: int, wanted: bytes) -> None:
    seen = b""
    while wanted not in seen:
        seen += os.read(terminal, 4096)


def test_an_environment_goes_back_to_what_was_saved(etude: Etude, name: str) -> None:
    etude("exec", name, "sh", "-c", "echo one > f")
    saved = etude("snapshot", name, "before")
    assert saved.returncode == 0, saved.stderr
    etude("exec", name, "sh", "-c", "echo two > f; touch g")

    assert etude("rollback", name, "before").returncode == 0

    assert etude("exec", name, "sh", "-c", "cat f; ls").stdout == "one\nf\n"
    missing = etude("rollback", name, "never")
    assert (missing.returncode, "[NotFound]" in missing.stderr) == (3, True)


def test_an_environment_becomes_what_was_shared_of_another_that_is_gone(
    etude: Etude, processes: Processes, name: str
) -> None:
    place = ("create", processes.broker, "--template", "python")
    lost = etude(*place).stdout.strip()
    etude("exec", lost, "sh", "-c", "echo one > f")
    saved = etude("snapshot", lost, "before", "--share")
    assert saved.returncode == 0, saved.stderr
    assert etude("rm", lost).returncode == 0

    assert etude("restore", name, saved.stdout.strip()).returncode == 0

    assert etude("exec", name, "cat", "f").stdout == "one\n"
    others = {
        saved.stdout.strip()[:-1] + "-": "[Corrupt]",
        f"{lost}-other@00": "[NotFound]",
        "before": "[Usage]",
    }
    for wrong, reason in others.items():
        refused = etude("restore", name, wrong)
        assert reason in refused.stderr
        assert refused.returncode in {2, 3, 4}


def test_forks_begin_as_their_parent_is_and_go_on_apart(etude: Etude, name: str) -> None:
    etude("exec", name, "sh", "-c", "echo parent > f")

    done = etude("fork", name, "--count", "2")
    assert done.returncode == 0, done.stderr
    one, other = done.stdout.split()
    etude("exec", one, "sh", "-c", "echo one >> f")

    assert etude("exec", one, "cat", "f").stdout == "parent\none\n"
    assert etude("exec", other, "cat", "f").stdout == "parent\n"
    assert etude("exec", name, "cat", "f").stdout == "parent\n"
    assert etude("rm", one, other).returncode == 0


@pytest.fixture
def run(processes: Processes, tmp_path: Path) -> Path:
    """A folder as a local run leaves it; it runs as long as somebody holds its lock."""
    made = tmp_path / "runs" / "demo"
    made.mkdir(parents=True)
    (made / "run.yaml").write_text("kind: RLRun\n")
    (made / "scratch").symlink_to(processes.folder / "scratch")
    port = int(processes.broker.rpartition(":")[2])
    pod = LocalPod(name="demo-repos-broker-0", role="broker", state="Ready", ports={"grpc": port})
    pool: dict[str, JsonValue] = {
        "metadata": {"name": "demo-repos"},
        "spec": {"templates": [{"name": "python"}]},
    }
    state = LocalState(pid=os.getpid(), updated_unix_ms=0, run={}, pools=(pool,), pods=(pod,))
    write_state(made, state)
    return made


def test_a_running_run_is_a_pool(etude: Etude, run: Path) -> None:
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = etude("create", "demo")
        assert made.returncode == 0, made.stderr
        assert etude("rm", made.stdout.strip()).returncode == 0
        elsewhere = etude("create", "demo", "--pool", "other")
        assert elsewhere.returncode == 3
        assert "demo-repos-broker-0" in elsewhere.stderr
    assert etude("create", "demo").returncode == 6


@pytest.mark.usefixtures("run")
def test_a_rollout_s_environment_can_be_entered(etude: Etude, name: str, tmp_path: Path) -> None:
    (tmp_path / "kept" / f"{name}.json").unlink()

    rows = [json.loads(line) for line in etude("ls", "--run", "demo", "--json").stdout.splitlines()]
    done = etude("exec", "--run", "demo", name, "echo", "inside")

    assert (name, False) in [(row["name"], row["is_yours"]) for row in rows]
    assert done.stdout == "inside\n"
    assert "counts in its result" in done.stderr


def test_the_commands_of_the_page_work_as_they_stand(
    etude: Etude, run: Path, tmp_path: Path
) -> None:
    (tmp_path / "my-project").mkdir()
    (tmp_path / "my-project" / "hello.py").write_text("print(6 * 7)")
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    name = "cli-4f"
    ends = []
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for line in "".join(blocks).splitlines():
            words = [name if word == "cli-4f" else word for word in line.split()]
            assert words[:2] == ["etude", "env"]
            ends += words[2:3] if words[2] == "rm" else []
            # The page ends the environment before it looks at those of a run.
            done = etude(*words[2:]) if not ends else etude(*words[2:], text="")
            name = done.stdout.strip() if words[2] == "create" else name
            assert done.returncode == (0 if not ends or words[2] in {"rm", "ls"} else 3), line
    assert ends == ["rm"]
    forks = [json.loads(row)["name"] for row in etude("ls", "--json").stdout.splitlines()]
    assert len(forks) == 2
    assert etude("rm", *forks).returncode == 0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("create", "127.0.0.1:1", "--template", "x"), 6, "[Unreachable]"),
        (("create", "no-run"), 3, "[NotFound]"),
        (("create", "127.0.0.1:1"), 2, "give --template NAME"),
        (("create", "127.0.0.1:1", "--template", "x", "--workspace", "none"), 3, "is not a folder"),
        (("create", "127.0.0.1:1", "--template", "x", "--ttl", "1"), 2, "--ttl"),
        (("exec", "nobody", "true"), 3, "no environment of yours"),
        (("exec", "", "true"), 3, "no environment of yours"),
        (("shell", "../../etc"), 3, "no environment of yours"),
        (("rm", "nobody"), 3, "no environment of yours"),
    ],
)
def test_what_cannot_work_is_said_with_a_way_out(
    etude: Etude, words: tuple[str, ...], code: int, said: str
) -> None:
    done = etude(*words)

    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_template_that_is_not_there_is_named(etude: Etude, processes: Processes) -> None:
    done = etude("create", processes.broker, "--template", "ruby")

    assert done.returncode == 4
    assert "template: is none of python" in done.stderr


def test_a_variable_without_a_value_is_refused(etude: Etude, name: str) -> None:
    done = etude("exec", "--env", "X", name, "true")

    assert (done.returncode, "give NAME=VALUE" in done.stderr) == (2, True)


def test_a_command_that_takes_too_long_is_ended_and_said_so(etude: Etude, name: str) -> None:
    done = etude("exec", "--timeout", "1", name, "sleep", "60")

    assert (done.returncode, done.stderr) == (143, "ended by the limit on time\n")


@pytest.mark.parametrize(
    "verb", ["create", "ls", "exec", "shell", "snapshot", "rollback", "restore", "fork", "rm"]
)
def test_every_verb_shows_two_examples(etude: Etude, verb: str) -> None:
    assert etude(verb, "--help").stdout.count(f"etude env {verb}") == 2
