"""Rows of SWE-bench as task folders: what becomes of one, and rows that are none."""

import hashlib
import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.environments import swebench_rows
from tests.support.environments.swebench_rows import git

from etude.common.harbor import task as harbor_task
from etude.envserver.tasks.formats import command


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("rows")
    return folder, swebench_rows.made(folder)


def imported(folder: Path, out: Path, *rows: object, more: tuple[str, ...] = ()) -> int:
    file = out.parent / "rows.jsonl"
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    file.write_text("\n".join(lines) + "\n")
    mirrors = str(folder / "mirrors")
    return command.main(
        ["swebench", str(file), "--repositories", mirrors, "--out", str(out), *more]
    )


def test_a_row_becomes_a_task_whose_tests_and_fix_stay_hidden(
    made: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, row = made
    assert imported(folder, tmp_path / "out", row) == 0
    task = harbor_task.read_task(tmp_path / "out" / "us__shop-1")
    assert task.instruction == row["problem_statement"]
    assert harbor_task.read_files(task.environment) == {
        "latest.py": swebench_rows.CODE.encode(),
        "shop.py": swebench_rows.CODE.encode(),
        "tests/test_old.py": b"x = 1\n",
        "tests/test_shop.py": swebench_rows.TESTS.encode(),
    }
    assert task.tests()["files/tests/test_shop.py"] == swebench_rows.MORE_TESTS.encode()
    assert task.solution()["files/shop.py"] == swebench_rows.FIXED.encode()
    expected = json.loads(task.tests()["expected.json"])
    assert expected["fail_to_pass"] == json.loads(row["FAIL_TO_PASS"])
    assert expected["pass_to_pass"] == row["PASS_TO_PASS"]
    assert expected["deleted"] == ["tests/test_old.py"]
    assert expected["command"].endswith("-p no:cacheprovider tests/test_shop.py")
    assert task.verifier_timeout_s == 1_800
    assert "2 links and submodules are left out, the first is out" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["bundle", "folder", "bare folder"])
def test_a_mirror_may_be_a_repository_or_a_bundle(
    kind: str, made: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, row = made
    mirrors = tmp_path / "mirrors"
    mirrors.mkdir()
    match kind:
        case "bundle":
            git(folder / "work", "bundle", "create", "-q", f"{mirrors}/us__shop.bundle", "--all")
        case "folder":
            (mirrors / "us").mkdir()
            shutil.copytree(folder / "work", mirrors / "us" / "shop", symlinks=True)
        case _:
            shutil.copytree(folder / "mirrors" / "us__shop.git", mirrors / "us__shop")
    assert imported(tmp_path, tmp_path / "out", row) == 0


def test_a_row_with_an_image_of_its_own_leaves_the_repository_there(
    made: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, row = made
    image = f"docker.io/swebench/sweb.eval.x86_64.{{instance}}@sha256:{'0' * 64}"
    more = ("--pin", "--image", image)
    assert imported(folder, tmp_path / "out", row, more=more) == 0
    task = harbor_task.read_task(tmp_path / "out" / "us__shop-1")
    assert task.image == image.replace("{instance}", "us_1776_shop-1")
    assert harbor_task.read_files(task.environment) == {}
    assert task.tests()["files/tests/test_shop.py"] == swebench_rows.MORE_TESTS.encode()
    assert imported(folder, tmp_path / "none", row | {"base_commit": "0" * 40}, more=more) == 1


def test_options_say_what_rows_do_not(
    made: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, row = made
    more = ("--test-command", "make test", "--image", "shop", "--timeout", "60")
    without = {k: v for k, v in row.items() if k != "patch"} | {"speed": 1}
    assert imported(folder, tmp_path / "out", without, more=more) == 0
    task = harbor_task.read_task(tmp_path / "out" / "us__shop-1")
    assert json.loads(task.tests()["expected.json"])["command"] == "make test tests/test_shop.py"
    assert (task.image, task.verifier_timeout_s) == ("shop", 60)
    assert task.solution() == {}
    said = capsys.readouterr().err
    assert "key speed is not read" in said
    assert "no gold patch" in said


Change = Callable[[dict[str, Any]], object]


def _set(**values: object) -> Change:
    return lambda row: row.update(values)


_PATCH = "--- a/{0}\n+++ b/{0}\n@@ -0,0 +1 @@\n+x\n"
_LINK = (
    "diff --git a/tests/l.py b/tests/l.py\nnew file mode 120000\n--- /dev/null\n"
    "+++ b/tests/l.py\n@@ -0,0 +1 @@\n+/etc/passwd\n\\ No newline at end of file\n"
)
BAD: dict[str, tuple[Change, str]] = {
    "no id": (lambda row: row.pop("instance_id"), "instance_id"),
    "an id that is a path": (_set(instance_id="../x"), "instance_id"),
    "an id that is no text": (_set(instance_id=1), "instance_id"),
    "a repository that is a path": (_set(repo="../.."), "holds no mirror of"),
    "a repository of three names": (_set(repo="a/b/c"), "repo"),
    "a repository that is not there": (_set(repo="us/other"), "holds no mirror of us/other"),
    "a short commit": (lambda row: row.update(base_commit=row["base_commit"][:8]), "no full name"),
    "a branch": (_set(base_commit="main"), "no full name"),
    "an option as a commit": (_set(base_commit="--all"), "no full name"),
    "a commit that is not there": (_set(base_commit="0" * 40), "there is no commit"),
    "no words": (_set(problem_statement=""), "problem_statement"),
    "no tests to repair": (_set(FAIL_TO_PASS=[]), "FAIL_TO_PASS"),
    "tests that are no list": (_set(FAIL_TO_PASS="[1"), "neither a list nor JSON"),
    "tests that are numbers": (_set(PASS_TO_PASS=[1]), "PASS_TO_PASS"),
    "no test patch": (_set(test_patch=""), "test_patch"),
    "a test patch that is none": (_set(test_patch="words"), "test_patch"),
    "a test patch for other files": (
        _set(test_patch=_PATCH.format("no/t.py").replace("-0,0 +1 @@", "-1 +1 @@\n-y")),
        "does not apply",
    ),
    "a test patch that climbs": (_set(test_patch=_PATCH.format("../../t.py")), "does not apply"),
    "a test patch into .git": (_set(test_patch=_PATCH.format(".git/config")), "test_patch"),
    "a test patch with a link": (_set(test_patch=_LINK), "no regular file"),
    "a gold patch that does not apply": (_set(patch=_PATCH.format("shop.py")), "patch"),
    "a gold patch that is no text": (_set(patch=1), "patch"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_row_that_is_none_is_refused_by_line_and_field(
    case: str,
    made: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, row = made
    change, message = BAD[case]
    bad = dict(row)
    change(bad)
    assert imported(folder, tmp_path / "out", bad, row) == 1
    shown = capsys.readouterr()
    assert message in shown.err
    assert "rows.jsonl:1: " in shown.err
    assert shown.out == "us__shop-1\n", "the good row after it is taken"


@pytest.mark.parametrize(
    "line", ["{", "[]", "1", "null", "[" * 50_000, '{"instance_id": "\\ud800"}']
)
def test_a_line_that_is_no_row_is_refused(
    line: str, made: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    assert imported(made[0], tmp_path / "out", line) == 1


@pytest.mark.parametrize(
    "name", [b"..", b".", b".git", b".GIT", b"a\nb", b"\xff", b"/etc"], ids=repr
)
def test_a_commit_with_names_that_leave_the_workspace_is_refused(
    name: bytes,
    made: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, row = made
    mirrors = tmp_path / "mirrors"
    shutil.copytree(folder / "mirrors", mirrors)
    mirror = mirrors / "us__shop.git"
    blob = git(mirror, "rev-parse", f"{row['base_commit']}:shop.py").strip()
    # Git itself writes no such tree; one that was made by hand is read like any other.
    data = b"tree %d\0" % (len(name) + 28) + b"100644 " + name + b"\0" + bytes.fromhex(blob)
    digest = hashlib.sha1(data, usedforsecurity=False).hexdigest()
    (mirror / "objects" / digest[:2]).mkdir(exist_ok=True)
    (mirror / "objects" / digest[:2] / digest[2:]).write_bytes(zlib.compress(data))
    commit = git(mirror, "commit-tree", "-m", "hostile", digest).strip()
    assert imported(tmp_path, tmp_path / "out", {**row, "base_commit": commit}) == 1
    said = capsys.readouterr().err
    assert "no path of a workspace" in said or "control characters or no UTF-8" in said


def test_a_file_that_is_not_there_and_a_limit_that_is_none_are_said(
    made: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, row = made
    mirrors, out = str(folder / "mirrors"), str(tmp_path / "out")
    absent = ["swebench", str(tmp_path / "no"), "--repositories", mirrors, "--out", out]
    assert command.main(absent) == 3
    assert imported(folder, tmp_path / "out", row, more=("--timeout", "0")) == 2
