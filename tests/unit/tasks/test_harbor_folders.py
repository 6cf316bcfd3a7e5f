"""Task folders: what is read, and how each bad one is refused by path and rule."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from etude.common.errors import UserError
from etude.common.harbor import task as harbor_task
from etude.envserver.tasks import show

GOOD = {
    "task.toml": (
        'version = "1.0"\n[metadata]\nauthor_name = "A"\netude_artefacts = ["src/*.py"]\n'
        "[verifier]\ntimeout_sec = 12.5\n[environment]\ncpus = 2\nmemory = '2G'\n"
    ),
    "instruction.md": "\nMake it work.\n\n",
    "environment/Dockerfile": "FROM python:3.11-slim\n",
    "environment/src/code.py": "x = 1\n",
    "tests/test.sh": "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n",
    "solution/solve.sh": "#!/bin/bash\ntrue\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for path, text in GOOD.items():
        target = tmp_path / "task-1" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return tmp_path / "task-1"


def test_a_good_folder_is_read_whole(folder: Path) -> None:
    task = harbor_task.read_task(folder)
    assert task.task_id == "task-1"
    assert task.instruction == "Make it work."
    assert "bash /tests/test.sh" in task.command
    assert task.verifier_timeout_s == 12.5
    assert task.artefacts == ("src/*.py",)
    assert set(task.tests()) == {"test.sh"}
    assert set(task.solution()) == {"solve.sh"}


def test_a_direct_verifier_command_replaces_the_script(folder: Path) -> None:
    text = '[metadata]\netude_verifier = "python3 /tests/verify.py"\n'
    (folder / "task.toml").write_text(text)
    assert harbor_task.read_task(folder).command == "python3 /tests/verify.py"


def test_unknown_keys_are_reported_and_metadata_is_free(folder: Path) -> None:
    text = (
        "speed = 1\n[metadata]\nx = 1\n[verifier]\ntimeout = 1\n[environment]\nmcp_servers = []\n"
        "[task]\nname = 'a/b'\nlicence = 'MIT'\n"
    )
    (folder / "task.toml").write_text(text)
    expected = ("speed", "task.licence", "verifier.timeout")
    assert harbor_task.read_task(folder).unknown_keys == expected


def _write(path: str, data: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / path).write_bytes(data)

    return write


def _remove(path: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        (folder / path).unlink()

    return remove


def _link(folder: Path) -> None:
    (folder / "environment" / "out").symlink_to("/etc/passwd")


def _linked_folder(folder: Path) -> None:
    (folder / "tests" / "more").symlink_to("/etc")


def _fifo(folder: Path) -> None:
    os.mkfifo(folder / "tests" / "pipe")


def _huge(folder: Path) -> None:
    with (folder / "environment" / "big").open("wb") as file:
        file.truncate(harbor_task.MAX_FILE_BYTES + 1)


BAD = {
    "no settings": (_remove("task.toml"), r"task\.toml.*is missing"),
    "bad TOML": (_write("task.toml", b"[verifier\n"), r"task\.toml.*is no TOML"),
    "no UTF-8": (_write("task.toml", b"x = '\xff'"), r"task\.toml.*is no TOML"),
    "unknown schema": (_write("task.toml", b"schema_version = '9'"), "schema_version"),
    "wrong type": (_write("task.toml", b"[verifier]\ntimeout_sec='x'"), r"verifier\.timeout_sec"),
    "endless limit": (
        _write("task.toml", b"[verifier]\ntimeout_sec=inf"),
        r"verifier\.timeout_sec",
    ),
    "several steps": (_write("task.toml", b"[[steps]]\nname='a'"), "steps"),
    "a GPU": (_write("task.toml", b"[environment]\ngpus=1"), r"environment\.gpus"),
    "a network": (
        _write("task.toml", b"[environment]\nallow_internet=true"),
        r"environment\.allow_internet",
    ),
    "some network": (
        _write("task.toml", b"[environment]\nnetwork_mode='allowlist'"),
        r"environment\.network_mode",
    ),
    "a fork without services": (
        _write("task.toml", b"[metadata]\netude_grade='fork'"),
        r"metadata.*needs etude_image",
    ),
    "no instruction": (_remove("instruction.md"), r"instruction\.md.*is missing"),
    "empty instruction": (_write("instruction.md", b" \n"), r"instruction\.md.*is empty"),
    "binary instruction": (_write("instruction.md", b"\xff\xfe"), r"instruction\.md.*not UTF-8"),
    "no tests": (_remove("tests/test.sh"), r"tests/test\.sh.*is missing"),
    "CRLF": (_write("tests/test.sh", b"true\r\n"), r"tests/test\.sh.*CRLF"),
    "CRLF solution": (_write("solution/solve.sh", b"true\r\n"), r"solve\.sh.*CRLF"),
    "no solution script": (_remove("solution/solve.sh"), r"solve\.sh.*is missing"),
    "link": (_link, r"environment/out.*symbolic link"),
    "linked folder": (_linked_folder, r"tests/more.*symbolic link"),
    "pipe": (_fifo, r"tests/pipe.*no regular file"),
    "huge file": (_huge, r"environment/big.*more than"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_folder_is_refused_by_path_and_rule(case: str, folder: Path) -> None:
    spoil, message = BAD[case]
    spoil(folder)
    with pytest.raises(UserError, match=message) as refusal:
        harbor_task.read_task(folder)
    assert refusal.value.problem.reason == "InvalidTask"
    assert refusal.value.problem.where.startswith(str(folder))


def test_a_name_that_is_no_task_id_is_refused(folder: Path) -> None:
    strange = folder.with_name("a b")
    folder.rename(strange)
    with pytest.raises(UserError, match="no task id"):
        harbor_task.read_task(strange)


def test_a_set_without_tasks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "absent"):
        with pytest.raises(UserError, match=r"holds no task|is no folder"):
            harbor_task.task_folders(path)


def test_the_digest_follows_everything_that_decides_a_grade(folder: Path) -> None:
    seen = {harbor_task.read_task(folder).digest()}
    changes = {
        "environment/src/code.py": "x = 2\n",
        "tests/test.sh": "true\n",
        "task.toml": "[verifier]\ntimeout_sec = 1.0\n",
    }
    for path, text in changes.items():
        (folder / path).write_text(text)
        seen.add(harbor_task.read_task(folder).digest())
    assert len(seen) == 4
    (folder / "instruction.md").write_text("Other words.")
    assert harbor_task.read_task(folder).digest() in seen


def test_showing_a_task_spells_control_characters_out(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "environment" / "src" / "code.py").write_text("x = '\x1b[31m'\n")
    assert show.main([str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "Make it work." in shown
    assert "verifier     bash /tests/test.sh, at most 12.5 s" in shown
    assert r"\x1b[31m" in shown
    assert "\x1b" not in shown
    assert show.main([str(folder / "tests")]) == 4
