"""A tiny repository with a bug, its mirror, and the benchmark's row about it."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

CODE = "def total(values):\n    return sum(values)\n"
FIXED = "def total(values):\n    return sum(each for each in values if each is not None)\n"
TESTS = "from shop import total\n\n\ndef test_sums():\n    assert total([1, 2]) == 3\n"
MORE_TESTS = (
    TESTS + "\n\ndef test_leaves_out_what_is_missing():\n    assert total([1, None, 2]) == 3\n"
)


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null"},
    )
    return done.stdout


def _committed(folder: Path, files: dict[str, str], message: str) -> str:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", message)
    return git(folder, "rev-parse", "HEAD").strip()


def made(folder: Path) -> dict[str, Any]:
    """A row, with folder/mirrors/us__shop.git beside a work tree of the fixed repository."""
    work = folder / "work"
    work.mkdir(parents=True)
    git(work, "init", "-q", "-b", "main")
    (work / "latest.py").symlink_to("shop.py")
    (work / "out").symlink_to("/etc/passwd")
    (work / "root.py").symlink_to("/shop.py")
    base = _committed(
        work,
        {"shop.py": CODE, "tests/test_shop.py": TESTS, "tests/test_old.py": "x = 1\n"},
        "base",
    )
    _committed(work, {"shop.py": FIXED}, "fix")
    gold = git(work, "diff", base, "HEAD")
    (work / "tests/test_old.py").unlink()
    after = _committed(work, {"tests/test_shop.py": MORE_TESTS}, "tests")
    tests = git(work, "diff", "HEAD~1", after)
    mirrors = folder / "mirrors"
    mirrors.mkdir()
    git(folder, "clone", "-q", "--mirror", str(work), str(mirrors / "us__shop.git"))
    return {
        "instance_id": "us__shop-1",
        "repo": "us/shop",
        "base_commit": base,
        "problem_statement": "`total` fails where a value is missing.",
        "hints_text": "",
        "patch": gold,
        "test_patch": tests,
        "FAIL_TO_PASS": json.dumps(["tests/test_shop.py::test_leaves_out_what_is_missing"]),
        "PASS_TO_PASS": ["tests/test_shop.py::test_sums"],
    }
