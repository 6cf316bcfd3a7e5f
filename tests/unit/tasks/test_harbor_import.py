"""Importing Harbor tasks: what a task becomes, and 100 folders that are none."""

import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from etude.common.harbor import task as folders
from etude.envserver.tasks.formats import command

GOOD: Mapping[str, str | bytes] = {
    "task.toml": (
        'version = "1.0"\nartifacts = ["/workspace/out.txt"]\n[task]\nname = "us/words"\n'
        '[metadata]\nauthor_name = "A"\n'
        "[agent]\ntimeout_sec = 100.0\n[verifier]\ntimeout_sec = 12.5\n"
        "[environment]\nmemory = '2G'\nallow_internet = true\n"
    ),
    "instruction.md": "Count the words.\n",
    "environment/Dockerfile": "FROM python:3.11-slim\nWORKDIR /workspace\nCOPY words words/\n",
    "environment/words/count.py": "x = 1\n",
    "tests/test.sh": "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n",
    "solution/solve.sh": "#!/bin/bash\ntrue\n",
}


def make(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    for path, content in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def imported(folder: Path, out: Path, *more: str) -> int:
    return command.main(["harbor", str(folder), "--out", str(out), "--files", *more])


def test_a_task_becomes_one_that_runs_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "words", GOOD)
    assert imported(tmp_path / "words", tmp_path / "out") == 0
    task = folders.read_task(tmp_path / "out" / "words")
    assert task.unknown_keys == ()
    assert folders.read_files(task.environment) == {"words/count.py": b"x = 1\n"}
    assert task.verifier_timeout_s == 12.5
    assert task.artefacts == ()
    shown = capsys.readouterr()
    assert shown.out == "words\n"
    assert "environment.allow_internet = True, but sandboxes have no network" in shown.err
    assert "its Dockerfile is not built" in shown.err


def test_a_folder_of_tasks_is_taken_and_each_refused_one_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "set" / "a", GOOD)
    make(
        tmp_path / "set" / "b",
        {**GOOD, "environment/compose.yaml": "services: {main: {}, db: {}}\n"},
    )
    make(tmp_path / "set" / "c", GOOD)
    assert imported(tmp_path / "set", tmp_path / "out") == 1
    shown = capsys.readouterr()
    assert shown.out == "a\nc\n"
    assert "environment/compose.yaml  describes services (main, db); an environment" in shown.err
    assert f"2 tasks in {tmp_path / 'out'}, 1 refused" in shown.err
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a", "c"]


def test_a_task_is_not_written_over_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "set" / "words", GOOD)
    assert imported(tmp_path / "set", tmp_path / "out") == 0
    make(tmp_path / "set" / "zebra", GOOD)
    capsys.readouterr()
    assert imported(tmp_path / "set", tmp_path / "out") == 1
    shown = capsys.readouterr()
    assert "exists already" in shown.err
    assert shown.out == "zebra\n", "the task after it is taken"


def test_unknown_keys_are_reported_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toml = "speed = 1\n[environment]\nwings = 2\n[verifier]\ntimeout_sec = 3\nx = 1979-05-27\n"
    make(tmp_path / "words", {**GOOD, "task.toml": toml})
    assert imported(tmp_path / "words", tmp_path / "out") == 0
    shown = capsys.readouterr().err
    for key in ("speed", "environment.wings", "verifier.x"):
        assert f"key {key} is not known, and left out" in shown
    kept = tomllib.loads((tmp_path / "out" / "words" / "task.toml").read_text())
    assert kept["verifier"] == {"timeout_sec": 3}


def test_artifacts_of_a_separate_verifier_move_with_the_workspace(tmp_path: Path) -> None:
    toml = (
        "artifacts = ['/app/out.txt', { source = '/app/build', destination = 'b' }]\n"
        "[environment]\nworkdir = '/app'\n[verifier]\nenvironment_mode = 'separate'\n"
    )
    make(tmp_path / "words", {**GOOD, "task.toml": toml})
    assert imported(tmp_path / "words", tmp_path / "out") == 0
    task = folders.read_task(tmp_path / "out" / "words")
    assert task.artefacts == ("out.txt", "out.txt/**", "build", "build/**")


Spoil = Callable[[Path], None]


def _toml(text: str | bytes) -> Mapping[str, str | bytes]:
    return {"task.toml": text}


_TOMLS: Mapping[str, str | bytes] = {
    "bad TOML": "[verifier\n",
    "TOML that is no UTF-8": b"x = '\xff'",
    "TOML with NUL": b"x = 1\0",
    "depth": "a = " + "[" * 5_000,
    "an unknown schema": "schema_version = '9.0'",
    "a schema that is a number": "schema_version = 1.4",
    "steps without files": "[[steps]]\nname = 'one'",
    "a GPU": "[environment]\ngpus = 1",
    "Windows": "[environment]\nos = 'windows'",
    "a tool server": "[[environment.mcp_servers]]\nname = 'a'\ncommand = 'b'",
    "variables of the host": "[environment.env]\nA = '${HOME}'",
    "a secret of the host": "[verifier.env]\nA = '${OPENAI_API_KEY}'",
    "skills": "[environment]\nskills_dir = '/x'",
    "services to collect from": "[[verifier.collect]]\ncommand = 'x'",
    "an environment of the verifier": "[verifier.environment]\ncpus = 1",
    "root": "[agent]\nuser = 'root'",
    "no time": "[verifier]\ntimeout_sec = 0",
    "endless time": "[verifier]\ntimeout_sec = inf",
    "time that is no number": "[verifier]\ntimeout_sec = 'long'",
    "a section that is none": "verifier = 1",
    "an environment that is none": "environment = 'x'",
    "a workspace that is no text": "[environment]\nworkdir = 1",
    "sizes at odds": "[environment]\nmemory = '1G'\nmemory_mb = 1",
    "a size that is none": "[environment]\nmemory = 'big'",
    "an artefact outside": (
        "artifacts = ['/etc/passwd']\n[verifier]\nenvironment_mode = 'separate'"
    ),
    "an artefact by traversal": (
        "artifacts = ['/app/../etc']\n[verifier]\nenvironment_mode = 'separate'"
    ),
    "artifacts that are none": "artifacts = 1",
    "a verifier of no words": "[metadata]\netude_verifier = ''",
    "artefacts that are no texts": "[metadata]\netude_artefacts = [1]",
}
_FILES: Mapping[str, Mapping[str, str | bytes]] = {
    "compose": {"environment/docker-compose.yaml": "services: {}"},
    "compose of no YAML": {"environment/docker-compose.yaml": "a: [\0"},
    "an instruction of nothing": {"instruction.md": " \n"},
    "a binary instruction": {"instruction.md": b"\xff\xfe\0"},
    "CRLF in the tests": {"tests/test.sh": "true\r\n"},
    "CRLF in the solution": {"solution/solve.sh": "true\r\n"},
    "tests of another program": {"tests/test.sh": "#!/usr/bin/env python3\n"},
    "a solution of another program": {"solution/solve.sh": "#!/usr/bin/perl\n"},
}


def _remove(path: str) -> Spoil:
    return lambda folder: (folder / path).unlink()


def _link(path: str, target: str) -> Spoil:
    def link(folder: Path) -> None:
        (folder / path).unlink(missing_ok=True)
        (folder / path).symlink_to(target)

    return link


def _renamed(path: str, name: str) -> Spoil:
    def rename(folder: Path) -> None:
        (folder / path).rename(folder / name)

    return rename


def _huge(path: str) -> Spoil:
    def grow(folder: Path) -> None:
        with (folder / path).open("ab") as file:
            file.truncate(folders.MAX_FILE_BYTES + 1)

    return grow


def _folder(path: str) -> Spoil:
    def replace(folder: Path) -> None:
        (folder / path).unlink()
        (folder / path).mkdir()

    return replace


def _many(folder: Path) -> None:
    for number in range(17):
        with (folder / f"environment/words/{number}").open("wb") as file:
            file.truncate(folders.MAX_FILE_BYTES)


def _odd_name(folder: Path) -> None:
    (folder / "environment" / "a\nb").write_text("x")


def _bytes_name(folder: Path) -> None:
    Path(os.fsdecode(os.fsencode(folder) + b"/tests/\xff")).write_text("x")


_SPOILS: Mapping[str, Spoil] = {
    "no instruction": _remove("instruction.md"),
    "no tests": _remove("tests/test.sh"),
    "no solution script": _renamed("solution/solve.sh", "solution/other.sh"),
    "a link out": _link("environment/words/out", "/etc/passwd"),
    "a link up": _link("environment/words/up", "../../../.."),
    "a link in place of the tests": _link("tests/test.sh", "/bin/true"),
    "a link in place of the settings": _link("task.toml", "/etc/hostname"),
    "a link in place of the Dockerfile": _link("environment/Dockerfile", "/etc/hostname"),
    "a dangling link": _link("solution/x", "absent"),
    "a link to itself": _link("tests/loop", "loop"),
    "a link to a folder": _link("tests/all", "/"),
    "a pipe": lambda folder: os.mkfifo(folder / "tests/pipe"),
    "a huge settings file": _huge("task.toml"),
    "a huge instruction": _huge("instruction.md"),
    "a huge Dockerfile": _huge("environment/Dockerfile"),
    "a huge test": _huge("tests/test.sh"),
    "much in all": _many,
    "a name with a line end": _odd_name,
    "a name that is no UTF-8": _bytes_name,
    "a folder in place of the tests": _folder("tests/test.sh"),
}


def _hostile() -> dict[str, tuple[Mapping[str, str | bytes], Spoil]]:
    found: dict[str, tuple[Mapping[str, str | bytes], Spoil]] = {}
    files: Mapping[str, Mapping[str, str | bytes]] = {
        **{f"task.toml: {n}": _toml(text) for n, text in _TOMLS.items()},
        **_FILES,
    }
    for name, each in files.items():
        found[name] = (each, lambda _: None)
    for name, spoil in _SPOILS.items():
        found[name] = ({}, spoil)
    return found


HOSTILE = _hostile()


@pytest.mark.parametrize("case", HOSTILE)
def test_a_folder_that_is_no_task_is_refused_by_path_and_rule(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, spoil = HOSTILE[case]
    folder = make(tmp_path / "task", {**GOOD, **files})
    spoil(folder)
    assert imported(folder, tmp_path / "out") == 1
    said = capsys.readouterr().err
    assert "fix: " in said
    assert "[InvalidTask]" in said
    assert "0 tasks in" in said
    assert list((tmp_path / "out").iterdir()) == []


def test_a_dockerfile_is_built_unless_the_task_is_refused_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing can build, the error names the program and its package."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("ETUDE_IMAGES", str(tmp_path / "images"))
    words = ["harbor", str(make(tmp_path / "words", GOOD)), "--out", str(tmp_path / "out")]
    assert command.main(words) == 1
    said = capsys.readouterr().err
    assert "buildah" in said
    assert "is not installed" in said
    make(tmp_path / "words", {"task.toml": _TOMLS["steps without files"]})
    assert command.main(words) == 1
    assert "buildah" not in capsys.readouterr().err


def test_a_task_without_a_dockerfile_says_how_it_can_be_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(tmp_path / "words", GOOD)
    (folder / "environment/Dockerfile").unlink()
    assert command.main(["harbor", str(folder), "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert "--pin" in said
    assert "--files" in said
    assert imported(folder, tmp_path / "out") == 0
