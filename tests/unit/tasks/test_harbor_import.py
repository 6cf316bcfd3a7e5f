"""Importing Harbor tasks: what a task becomes, and 100 folders that are none."""

import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml

from etude.common.harbor import task as folders
from etude.envserver.images.spec import read_spec
from etude.envserver.tasks.formats import command

DIGEST = "sha256:" + "0" * 64
GOOD: Mapping[str, str | bytes] = {
    "task.toml": (
        'version = "1.0"\nartifacts = ["/app/out.txt"]\n[task]\nname = "us/words"\n'
        '[metadata]\nauthor_name = "A"\n'
        "[agent]\ntimeout_sec = 100.0\n[verifier]\ntimeout_sec = 12.5\n"
        "[environment]\nmemory = '2G'\nallow_internet = true\n"
    ),
    "instruction.md": "Count the words.\n",
    "environment/Dockerfile": (
        "# syntax=docker/dockerfile:1\nFROM python:3.11-slim\nWORKDIR /app\nCOPY words words/\n"
    ),
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
    return command.main(["harbor", str(folder), "--out", str(out), *more])


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
    assert "needs its image: etude images build words/image.yaml" in shown.err


def test_the_image_of_a_task_is_a_spec_with_a_link_from_its_own_folder(tmp_path: Path) -> None:
    make(tmp_path / "words", GOOD)
    assert imported(tmp_path / "words", tmp_path / "out") == 0
    folder = tmp_path / "out" / "words"
    spec = read_spec(folder / "image.yaml")
    assert spec.name == folders.read_task(folder).image == "task-words"
    assert spec.base.debian is not None
    assert spec.base.debian.suite == "bookworm"
    assert "ln -s /workspace /app" in spec.setup[-1].run
    assert spec.files == ()


def test_a_folder_of_tasks_is_taken_and_each_refused_one_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "set" / "a", GOOD)
    make(tmp_path / "set" / "b", {**GOOD, "environment/Dockerfile": "FROM x\nADD a b\n"})
    make(tmp_path / "set" / "c", GOOD)
    assert imported(tmp_path / "set", tmp_path / "out") == 1
    shown = capsys.readouterr()
    assert shown.out == "a\nc\n"
    assert "environment/Dockerfile line 2  `ADD a b`: copy files of environment/" in shown.err
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


def test_what_a_build_does_is_kept_step_by_step_and_proved_to_leave_the_workspace(
    tmp_path: Path,
) -> None:
    dockerfile = (
        "FROM base:1\nARG SUITE=tests\nENV PIP_NO_CACHE_DIR=1\nWORKDIR /srv/app\n"
        "RUN apt-get update \\\n  # a remark\n  && apt-get install -y curl\n"
        "COPY --chmod=755 words/*.py ./\nCOPY words/count.py /etc/${SUITE}.py\n"
        'RUN ["python3", "-c", "print(1)"]\nLABEL a=b\nCMD ["bash"]\n'
    )
    make(tmp_path / "words", {**GOOD, "environment/Dockerfile": dockerfile})
    oci = ("--oci", f"base:1={tmp_path}/layout@{DIGEST}")
    assert imported(tmp_path / "words", tmp_path / "out", *oci) == 0
    spec = read_spec(tmp_path / "out" / "words" / "image.yaml")
    assert spec.base.oci is not None
    assert spec.base.oci.digest == DIGEST
    link, apt, copy, other, python, proof = (step.run for step in spec.setup)
    assert "ln -s /workspace /srv/app" in link
    assert "export PIP_NO_CACHE_DIR=1" in apt
    assert "export SUITE=tests" in apt
    assert "cd /srv/app" in apt
    assert "remark" not in apt
    assert "> /srv/app/count.py" in copy
    assert "chmod 0755 /srv/app/count.py" in copy
    assert "> /etc/tests.py" in other
    assert "python3 -c" in python
    assert "sha256sum" in proof
    assert [step.network for step in spec.setup] == [False, True, True, True, True, False]
    sums = {file.path: file.text for file in spec.files}["/opt/etude-context/workspace"]
    assert sums.endswith("  ./count.py\n")
    tree = tmp_path / "out" / "words" / "environment"
    assert (tree / "count.py").stat().st_mode & 0o100


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
        "[verifier]\nenvironment_mode = 'separate'\n"
    )
    make(tmp_path / "words", {**GOOD, "task.toml": toml})
    assert imported(tmp_path / "words", tmp_path / "out") == 0
    task = folders.read_task(tmp_path / "out" / "words")
    assert task.artefacts == ("out.txt", "out.txt/**", "build", "build/**")


Spoil = Callable[[Path], None]


def _toml(text: str | bytes) -> Mapping[str, str | bytes]:
    return {"task.toml": text}


def _dockerfile(*lines: str) -> Mapping[str, str | bytes]:
    return {"environment/Dockerfile": "\n".join(lines) + "\n"}


_FROM = ("FROM python:3.11", "WORKDIR /app")
_LINES = {
    "ADD": "ADD https://example.org/x /x",
    "a user": "USER nobody",
    "a volume": "VOLUME /data",
    "an entry point": 'ENTRYPOINT ["x"]',
    "a health check": "HEALTHCHECK CMD true",
    "a trigger": "ONBUILD RUN x",
    "a shell": 'SHELL ["/bin/bash", "-c"]',
    "a stage": "FROM python:3.11",
    "a copy from a stage": "COPY --from=x /a /b",
    "an owner": "COPY --chown=a words /b",
    "a mode that is none": "COPY --chmod=u+x words /b",
    "a mount of a secret": "RUN --mount=type=secret,id=x cat /run/secrets/x",
    "a network": "RUN --network=host true",
    "a here-document": "RUN <<EOF\ntrue\nEOF",
    "an empty run": "RUN",
    "a variable of the agent": "ENV API_KEY=1",
    "the agent's path": "ENV PATH=/opt/x:$PATH",
    "an odd replacement": "WORKDIR ${A:+b}",
    "an unclosed replacement": "WORKDIR ${",
    "no folder": "WORKDIR",
    "a copy of nothing": "COPY",
    "a copy of one word": "COPY words",
    "a copy of what is not there": "COPY absent /app",
    "a copy from outside": "COPY ../../etc/passwd /app",
    "a copy from outside by glob": "COPY words/../../*/passwd /app",
    "an open quote": "COPY 'words /app",
    "no instruction": "apt-get update",
    "an unknown instruction": "MAKE x",
    "an argument that is none": "ARG 1x=2",
    "a workspace that is the root": "WORKDIR /",
    "a workspace in the system": "WORKDIR /usr",
    "a workspace in /etc": "WORKDIR /etc/app",
    "a workspace in the tests": "WORKDIR /tests/app",
    "a workspace in the workspace": "WORKDIR /workspace/app",
    "a workspace by traversal": "WORKDIR ../../etc",
    "65 steps": "\n".join(f"RUN echo {n}" for n in range(65)),
    "a step without end": "RUN " + "x" * 70_000,
}
_FIRST: Mapping[str, str | bytes] = {
    "nothing at all": "",
    "no base": "RUN true",
    "scratch": "FROM scratch\nWORKDIR /app",
    "an unknown base": "FROM ubuntu:24.04\nWORKDIR /app",
    "another registry": "FROM evil.example/python:3.11\nWORKDIR /app",
    "an unknown Python": "FROM python:3.9\nWORKDIR /app",
    "a Python of another Debian": "FROM python:3.11-trixie\nWORKDIR /app",
    "another processor": "FROM --platform=linux/arm64 python:3.11\nWORKDIR /app",
    "another mark of continuation": "# escape=`\nFROM python:3.11\nWORKDIR /app",
    "no workspace": "FROM python:3.11",
    "a base by an unset variable": "FROM python:$V\nWORKDIR /app",
    "NUL": "FROM python:3.11\0\nWORKDIR /app",
    "no UTF-8": b"FROM python:3.11\xff\nWORKDIR /app",
}
_TOMLS: Mapping[str, str | bytes] = {
    "bad TOML": "[verifier\n",
    "TOML that is no UTF-8": b"x = '\xff'",
    "TOML with NUL": b"x = 1\0",
    "depth": "a = " + "[" * 5_000,
    "an unknown schema": "schema_version = '9.0'",
    "a schema that is a number": "schema_version = 1.4",
    "steps": "[[steps]]\nname = 'one'",
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
    "a workspace in the system, by key": "[environment]\nworkdir = '/etc'",
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
    "an ignore file": {"environment/.dockerignore": "words\n"},
    "an instruction of nothing": {"instruction.md": " \n"},
    "a binary instruction": {"instruction.md": b"\xff\xfe\0"},
    "CRLF in the tests": {"tests/test.sh": "true\r\n"},
    "CRLF in the solution": {"solution/solve.sh": "true\r\n"},
    "tests of another program": {"tests/test.sh": "#!/usr/bin/env python3\n"},
    "a solution of another program": {"solution/solve.sh": "#!/usr/bin/perl\n"},
    "a large context for the image": {
        **_dockerfile(*_FROM, "COPY words words", "RUN true"),
        "environment/words/big": os.urandom(1 << 20),
    },
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
    "no Dockerfile": _remove("environment/Dockerfile"),
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
        **{f"line: {n}": _dockerfile(*_FROM, line) for n, line in _LINES.items()},
        **{f"Dockerfile: {n}": {"environment/Dockerfile": text} for n, text in _FIRST.items()},
        **{f"task.toml: {n}": _toml(text) for n, text in _TOMLS.items()},
        **_FILES,
    }
    for name, each in files.items():
        found[name] = (each, lambda _: None)
    for name, spoil in _SPOILS.items():
        found[name] = ({}, spoil)
    return found


HOSTILE = _hostile()


def test_there_are_a_hundred_of_them() -> None:
    assert len(HOSTILE) >= 100


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


@pytest.mark.parametrize("oci", ["base", "a=b", "a=b@sha256:0", "=x@" + DIGEST])
def test_a_layout_that_is_none_is_a_wrong_option(oci: str, tmp_path: Path) -> None:
    make(tmp_path / "words", GOOD)
    assert imported(tmp_path / "words", tmp_path / "out", "--oci", oci) == 2


def test_a_spec_is_plain_yaml(tmp_path: Path) -> None:
    make(tmp_path / "words", GOOD)
    imported(tmp_path / "words", tmp_path / "out")
    text = (tmp_path / "out" / "words" / "image.yaml").read_text()
    assert yaml.safe_load(text)["name"] == "task-words"
