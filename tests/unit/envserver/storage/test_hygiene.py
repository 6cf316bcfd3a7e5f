"""First files without what holds answers."""

import subprocess
from pathlib import Path

from etude.envserver.storage import hygiene
from etude.envserver.storage.trees import File

FILES = {
    "shop.py": File(b"x = 1\n"),
    "run": File(b"#!/bin/sh\n", executable=True),
    "src/deep/a.py": File(b"y = 2\n"),
    "src.txt": File(b"sorts before the folder\n"),
}
LEFT = ("__pycache__/shop.cpython-311.pyc", ".mypy_cache/3.11/a.json", ".bash_history", "a.py.swp")


def test_leftovers_go_and_files_stay() -> None:
    assert hygiene.clean_first_files(FILES | {path: File(b"left") for path in LEFT}) == FILES


def test_git_finds_one_commit_with_the_first_files_and_nothing_changed(tmp_path: Path) -> None:
    tree = FILES | {".git/HEAD": File(b"ref: refs/heads/old\n"), ".git/logs/HEAD": File(b"more")}
    clean = hygiene.cut_history(tree)
    for path, file in clean.items():
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.content)
        target.chmod(0o755 if file.executable else 0o644)

    def git(*words: str) -> str:
        command = ["git", "-c", "safe.directory=*", "-C", str(tmp_path), *words]
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout

    assert git("rev-list", "--all", "--count").strip() == "1"
    assert git("status", "--porcelain") == ""
    assert git("ls-files").split() == sorted(FILES)
    git("fsck", "--strict")
    assert ".git/logs/HEAD" not in clean


def test_a_history_that_a_task_keeps_stays() -> None:
    tree = FILES | {".git/HEAD": File(b"ref: refs/heads/old\n")}
    assert hygiene.clean_first_files(tree, keeps_history=True) == tree
