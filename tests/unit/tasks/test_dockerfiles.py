"""Dockerfiles as recipes: the grammar, the rules of COPY, and text that is none."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.errors import UserError
from etude.envserver.storage.trees import File
from etude.envserver.tasks.formats import task_image, toml
from etude.envserver.tasks.formats.dockerfile import instructions
from etude.envserver.tasks.formats.dockerfile_recipe import (
    Copy,
    DockerfileRecipe,
    Run,
    follow_dockerfile,
)
from etude.envserver.tasks.formats.imported_task import ImportRefusedError

CONTEXT = {
    path: File(path.encode())
    for path in ("Dockerfile", "a.txt", "b.txt", "src/main.py", "src/lib/util.py", "docs/a.md")
}


def copied(*lines: str) -> dict[str, str]:
    """Where each file of the context lands."""
    recipe = follow_dockerfile("\n".join(("FROM python:3.11", "WORKDIR /app", *lines)), CONTEXT)
    found: dict[str, str] = {}
    for step in recipe.steps:
        if isinstance(step, Copy):
            found |= {path: file.content.decode() for path, file in step.files.items()}
    return found


COPIES = {
    "COPY a.txt .": {"/app/a.txt": "a.txt"},
    "COPY a.txt /app": {"/app/a.txt": "a.txt"},
    "COPY a.txt b": {"/app/b": "a.txt"},
    "COPY a.txt b/": {"/app/b/a.txt": "a.txt"},
    "COPY a.txt b.txt c/": {"/app/c/a.txt": "a.txt", "/app/c/b.txt": "b.txt"},
    "COPY *.txt /etc/": {"/etc/a.txt": "a.txt", "/etc/b.txt": "b.txt"},
    "COPY src .": {"/app/main.py": "src/main.py", "/app/lib/util.py": "src/lib/util.py"},
    "COPY src/ s/": {"/app/s/main.py": "src/main.py", "/app/s/lib/util.py": "src/lib/util.py"},
    "COPY s* s": {"/app/s/main.py": "src/main.py", "/app/s/lib/util.py": "src/lib/util.py"},
    "COPY src/lib x": {"/app/x/util.py": "src/lib/util.py"},
    "COPY /a.txt ./x/../y": {"/app/y": "a.txt"},
    "COPY /../a.txt y": {"/app/y": "a.txt"},
    'COPY ["a.txt", "with space/"]': {"/app/with space/a.txt": "a.txt"},
    "WORKDIR sub\nCOPY a.txt .": {"/app/sub/a.txt": "a.txt"},
    "ARG WHAT=a\nCOPY ${WHAT}.txt $WHAT/": {"/app/a/a.txt": "a.txt"},
    "COPY --link --chmod=0644 a.txt .": {"/app/a.txt": "a.txt"},
    "copy a.txt \\\n   # why\n\n  b/": {"/app/b/a.txt": "a.txt"},
}


@pytest.mark.parametrize("line", COPIES)
def test_copied_files_land_where_a_build_would_put_them(line: str) -> None:
    assert copied(line) == COPIES[line]


def test_a_copy_of_everything_leaves_the_dockerfile_out() -> None:
    assert set(copied("COPY . .")) == {f"/app/{path}" for path in CONTEXT if path != "Dockerfile"}


@pytest.mark.parametrize("pattern", ["*.md", "?.md", "docs/*.txt", "src/*.py.bak"])
def test_a_glob_stays_within_its_folder(pattern: str) -> None:
    with pytest.raises(ImportRefusedError, match="holds no"):
        copied(f"COPY {pattern} x/")


@pytest.mark.parametrize("source", ["../a.txt", "src/../../a.txt", ".."])
def test_a_copy_from_outside_of_the_context_is_called_that(source: str) -> None:
    with pytest.raises(ImportRefusedError, match="leaves environment/"):
        copied(f"COPY {source} x")


def test_lines_are_counted_where_they_begin() -> None:
    text = "# one\nFROM a\n\nRUN x \\\n  && y\nRUN z \\\n"
    assert [(each.line, each.word, each.text) for each in instructions(text)] == [
        (2, "FROM", "a"),
        (4, "RUN", "x   && y"),
        (6, "RUN", "z"),
    ]


def test_a_run_sees_the_folder_and_the_variables_before_it() -> None:
    lines = 'FROM python:3.11\nENV PIP_X="a b" TZ=UTC\nWORKDIR /app\nRUN echo $TZ\nWORKDIR /b\n'
    (run,) = follow_dockerfile(lines, {}).steps
    assert isinstance(run, Run)
    assert run.script == (
        "export PIP_X='a b'\nexport TZ=UTC\nmkdir -p /app\ncd /app\n/bin/sh -c 'echo $TZ'\n"
    )


def test_the_same_dockerfile_makes_the_same_spec() -> None:
    text = "FROM python:3.11\nWORKDIR /app\nCOPY . .\nRUN true\nCOPY a.txt /etc/\n"
    made = [task_image.make_task_image(follow_dockerfile(text, CONTEXT), "a", {}) for _ in range(2)]
    assert task_image.spec_text(made[0].spec) == task_image.spec_text(made[1].spec)
    assert set(made[0].workspace) == set(CONTEXT) - {"Dockerfile"}


_WORDS = st.sampled_from(
    [
        *(
            "FROM",
            "RUN",
            "COPY",
            "WORKDIR",
            "ENV",
            "ARG",
            "ADD",
            "#",
            "\\\n",
            "\n",
            " ",
            "=",
            '"',
            "'",
        ),
        *(
            "python:3.11",
            "/app",
            ".",
            "..",
            "a.txt",
            "*",
            "${A",
            "$A",
            "${A:-b}",
            "[",
            "]",
            "--chmod=9",
        ),
        *("--from=x", "A=1", "<<EOF", "\0", "\udcff", "é", "\t", "\r\n", "# escape=`\n"),
    ]
)


@given(st.lists(_WORDS, max_size=30))
def test_no_text_crashes_the_reader(words: list[str]) -> None:
    text = "FROM python:3.11\nWORKDIR /app\n" + "".join(words)
    try:
        made = task_image.make_task_image(follow_dockerfile(text, CONTEXT), "a", {})
    except UserError:
        return
    assert all(not path.startswith("/") and ".." not in path for path in made.workspace)


@given(st.text(max_size=200))
def test_no_first_text_crashes_the_reader(text: str) -> None:
    try:
        recipe = follow_dockerfile(text, {})
    except UserError:
        return
    assert isinstance(recipe, DockerfileRecipe)


_VALUES: st.SearchStrategy[object] = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    | st.dates(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3)
    ),
    max_leaves=8,
)
_KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@given(st.dictionaries(_KEYS, _VALUES, max_size=5))
def test_written_toml_is_read_back_as_it_was(table: dict[str, object]) -> None:
    assert tomllib.loads(toml.write_toml(table)) == table


def built(folder: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    """The setup steps of an image, run on a folder in place of a root."""
    text = "\n".join(("FROM python:3.11", "WORKDIR /workspace", *lines))
    made = task_image.make_task_image(follow_dockerfile(text, CONTEXT), "a", {})

    def moved(text: str) -> str:
        return re.sub(
            r"(?<![\w.])/(workspace|opt/etude-context|tmp/found|etc)\b", rf"{folder}/\1", text
        )

    for name in ("workspace", "opt/etude-context", "tmp", "etc"):
        (folder / name).mkdir(parents=True)
    for file in made.spec.files:
        Path(moved(file.path)).write_text(file.text)
    done = subprocess.CompletedProcess([], 0, "", "")
    for step in made.spec.setup[1:]:
        words = ("sh", "-e", "-c", moved(step.run))
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            return done
    return done


def test_an_image_is_built_with_the_files_and_keeps_none_of_the_workspace(tmp_path: Path) -> None:
    run = "RUN test -f src/lib/util.py && [ $(cat a.txt) = a.txt ] && false; true"
    done = built(tmp_path, "COPY src src", run.replace("a.txt", "src/main.py"), "COPY a.txt /etc/")
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "workspace").iterdir()) == []
    assert not (tmp_path / "opt" / "etude-context").exists()
    assert (tmp_path / "etc" / "a.txt").read_text() == "a.txt"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("echo x > new.txt", "./new.txt"),
        ("echo x >> src/main.py", "./src/main.py"),
        ("rm src/main.py", "./src/main.py"),
        ("ln -s src/main.py link", "./link"),
        ("mv src/main.py main.py", "./main.py"),
    ],
)
def test_a_build_that_changes_the_workspace_fails_and_says_where(
    command: str, said: str, tmp_path: Path
) -> None:
    done = built(tmp_path, "COPY src src", f"RUN {command}")
    assert done.returncode == 1
    assert said in done.stdout
    assert "a RUN changed the workspace" in done.stdout


def test_a_run_that_fails_ends_the_build(tmp_path: Path) -> None:
    assert built(tmp_path, "RUN exit 7").returncode == 7
    assert built(tmp_path / "b", "RUN false; true").returncode == 0
