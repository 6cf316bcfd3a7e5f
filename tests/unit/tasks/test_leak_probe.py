"""What a workspace gives away: every rule with a planted violation, and hostile repositories."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from etude.envserver.tasks import hidden_content, leak_probe

WORKSPACE = {
    "table/reader.py": b"import csv\n\n\ndef rows(text):\n    return list(csv.reader(text))\n",
    "README.md": b"A reader of tables in text files.\n",
}
FIX = (
    b"import csv\n\n\ndef rows(text):\n    lines = text.splitlines()\n"
    b"    return [dict(each) for each in csv.DictReader(lines)]\n"
)
SOLUTION = {"solve.sh": b"#!/bin/bash\ncp reader.py table/reader.py\n", "reader.py": FIX}
TESTS = {
    "test.sh": b"#!/bin/bash\npython3 /tests/check.py\n",
    "check.py": b"from table.reader import rows\n\nassert rows('a\\n1') == [{'a': '1'}]\n"
    b"assert rows('a,b\\n1,2') == [{'a': '1', 'b': '2'}]\nassert rows('a') == []\n",
}


class Repository:
    """A workspace under git, in a folder of the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for path, content in WORKSPACE.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        self.git("init", "-q", "-b", "main")
        self.commit("first")
        self.forget()

    def git(self, *words: str, text: str = "") -> str:
        done = subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words],
            cwd=self.folder,
            input=text,
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null"},
        )
        return done.stdout.strip()

    def commit(self, message: str) -> str:
        self.git("add", "-A")
        self.git("commit", "-q", "-m", message)
        return self.git("rev-parse", "HEAD")

    def forget(self) -> None:
        """No reflog, no object without a name."""
        self.git("reflog", "expire", "--expire=now", "--all")
        self.git("gc", "-q", "--prune=now")
        for path in (self.folder / ".git" / "logs").rglob("*"):
            if path.is_file():
                path.unlink()


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "workspace")


def looked(folder: Path, *, keeps_history: bool = False) -> list[dict[str, str]]:
    """What the probe, as a sandbox runs it, finds in a folder."""
    place = folder.parent / "tests"
    place.mkdir(exist_ok=True)
    (place / "probe.py").write_bytes(Path(leak_probe.__file__).read_bytes())
    units = [
        {
            "rule": unit.rule,
            "name": unit.name,
            "lines": unit.lines,
            "exempt": unit.exempt,
            "needed": unit.needed,
        }
        for unit in hidden_content.hidden_units(WORKSPACE, TESTS, SOLUTION)
    ]
    hashes = hidden_content.hidden_hashes(TESTS, SOLUTION)
    found = {"hashes": hashes, "units": units, "keeps_history": keeps_history}
    (place / "units.json").write_text(json.dumps(found))
    report = folder.parent / "report.json"
    subprocess.run(
        [sys.executable, str(place / "probe.py"), str(folder), str(report)], check=True, timeout=300
    )
    findings: list[dict[str, str]] = json.loads(report.read_bytes())["findings"]
    return findings


def rules(findings: list[dict[str, str]]) -> set[str]:
    return {found["rule"] for found in findings}


def test_a_repository_of_one_commit_is_clean(repository: Repository) -> None:
    assert looked(repository.folder) == []


def test_a_repository_without_its_empty_folders_is_looked_at_all_the_same(
    repository: Repository,
) -> None:
    for folder in sorted((repository.folder / ".git").rglob("*"), reverse=True):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    assert not (repository.folder / ".git" / "refs").exists()
    assert looked(repository.folder) == []


def _future(repository: Repository) -> None:
    repository.git("checkout", "-q", "-b", "later")
    (repository.folder / "new.txt").write_text("what comes later\n")
    repository.commit("later")
    repository.git("checkout", "-q", "main")
    repository.forget()


def _history(repository: Repository) -> None:
    (repository.folder / "new.txt").write_text("what came then\n")
    repository.commit("second")
    repository.forget()


def _reflog(repository: Repository) -> None:
    repository.git("commit", "-q", "--allow-empty", "-m", "gone")
    repository.git("reset", "-q", "--hard", "HEAD~1")


def _stray(repository: Repository) -> None:
    repository.git("hash-object", "-w", "--stdin", text="nobody names me\n")


def _stray_packed(repository: Repository) -> None:
    name = repository.git("hash-object", "-w", "--stdin", text="nobody names me\n")
    repository.git("pack-objects", "-q", ".git/objects/pack/pack", text=name + "\n")
    (repository.folder / ".git" / "objects" / name[:2] / name[2:]).unlink()


def _alternates(repository: Repository) -> None:
    info = repository.folder / ".git" / "objects" / "info"
    info.mkdir(exist_ok=True)
    (info / "alternates").write_text("/var/lib/mirror/objects\n")


def _fix_in_an_object(repository: Repository) -> None:
    repository.git("hash-object", "-w", "--stdin", text=FIX.decode() + "# kept\n")


def _stash(repository: Repository) -> None:
    (repository.folder / "README.md").write_text("put aside\n")
    repository.git("stash", "-q")


def _written(path: str, content: bytes) -> Callable[[Repository], None]:
    def write(repository: Repository) -> None:
        target = repository.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)

    return write


def _config(*words: str) -> Callable[[Repository], object]:
    return lambda repository: repository.git("config", *words)


def _nested(repository: Repository) -> None:
    repository.git("clone", "-q", "--bare", ".", "vendor/mirror")


def _odd_extension(repository: Repository) -> None:
    repository.git("config", "core.repositoryFormatVersion", "1")
    repository.git("config", "extensions.wormhole", "true")


PLANTED: dict[str, tuple[Callable[[Repository], object], str]] = {
    "a commit of the future": (_future, "future"),
    "a branch beside the one that is checked out": (_future, "refs"),
    "a tag": (lambda r: r.git("tag", "v2"), "refs"),
    "a stash": (_stash, "refs"),
    "a second commit": (_history, "history"),
    "a reflog": (_reflog, "reflog"),
    "a commit that only the reflog names": (_reflog, "stray-objects"),
    "a loose object that nothing names": (_stray, "stray-objects"),
    "a packed object that nothing names": (_stray_packed, "stray-objects"),
    "objects from elsewhere": (_alternates, "stray-objects"),
    "a remote": (_config("remote.origin.url", "https://example.org/x"), "remotes"),
    "a repository in the repository": (_nested, "remotes"),
    "the fix beside its target": (_written("table/reader.py.new", FIX), "hidden-file"),
    "the fix with another end": (_written("old/r.py", FIX + b"# kept\n"), "gold-lines"),
    "the fix in an object": (_fix_in_an_object, "gold-lines"),
    "the solution's script": (_written("notes/run", SOLUTION["solve.sh"]), "hidden-file"),
    "a hidden test": (_written("tests/check.py", TESTS["check.py"]), "hidden-file"),
    "a hidden test, changed": (_written("t/c.py", TESTS["check.py"] + b"x = 1\n"), "tests-lines"),
    "a damaged object": (_written(".git/objects/00/" + "0" * 38, b"no zlib"), "unreadable"),
    "an odd extension": (_odd_extension, "unreadable"),
    "a configuration that leads out": (_config("include.path", "/etc/passwd"), "unreadable"),
    "a configuration that is none": (_written(".git/config", b"[core\n"), "unreadable"),
}


@pytest.mark.parametrize("case", PLANTED)
def test_what_is_planted_is_found(case: str, repository: Repository) -> None:
    plant, rule = PLANTED[case]
    plant(repository)
    found = looked(repository.folder)
    assert rule in rules(found), found


def test_history_may_be_kept_where_the_task_says_so(repository: Repository) -> None:
    _history(repository)
    assert looked(repository.folder, keeps_history=True) == []
    _future(repository)
    assert {"future", "refs"} <= rules(looked(repository.folder, keeps_history=True))


HOSTILE = {
    "core.fsmonitor": "{canary}",
    "core.hooksPath": "{hooks}",
    "core.sshCommand": "{canary}",
    "core.pager": "{canary}",
    "core.editor": "{canary}",
    "core.alternateRefsCommand": "{canary}",
    "diff.external": "{canary}",
    "gpg.program": "{canary}",
    "log.showSignature": "true",
    "filter.x.clean": "{canary}",
    "filter.x.smudge": "{canary}",
    "alias.rev-list": "!{canary}",
    "alias.fsck": "!{canary}",
    "uploadpack.packObjectsHook": "{canary}",
    "credential.helper": "!{canary}",
    "remote.origin.promisor": "true",
    "remote.origin.url": "ext::{canary}",
    "remote.origin.uploadpack": "{canary}",
    "extensions.partialClone": "origin",
    "protocol.ext.allow": "always",
    "protocol.allow": "always",
}


def test_no_configuration_of_a_hostile_repository_starts_a_program(
    repository: Repository, tmp_path: Path
) -> None:
    canary, seen = tmp_path / "canary.sh", tmp_path / "seen"
    canary.write_text(f"#!/bin/sh\ntouch {seen}\n")
    canary.chmod(0o755)
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for name in (
        "post-checkout",
        "post-index-change",
        "fsmonitor-watchman",
        "reference-transaction",
    ):
        (hooks / name).symlink_to(canary)
        (repository.folder / ".git" / "hooks").mkdir(exist_ok=True)
        (repository.folder / ".git" / "hooks" / name).symlink_to(canary)
    repository.git("config", "core.repositoryFormatVersion", "1")
    (repository.folder / ".gitattributes").write_text("* filter=x diff=x\n")
    for key, value in HOSTILE.items():
        with (repository.folder / ".git" / "config").open("a") as file:
            section, _, name = key.rpartition(".")
            group, _, inner = section.partition(".")
            head = f'[{group} "{inner}"]' if inner else f"[{group}]"
            file.write(f"{head}\n\t{name} = {value.format(canary=canary, hooks=hooks)}\n")
    assert "remotes" in rules(looked(repository.folder)), "git reads the configuration"
    assert not seen.exists()
    # A missing object, which a partial clone would fetch with the program of its remote.
    for path in (repository.folder / ".git" / "objects" / "pack").iterdir():
        path.unlink()
    looked(repository.folder)
    assert not seen.exists()


def test_many_findings_make_a_report_that_still_fits(repository: Repository) -> None:
    for number in range(150):
        (repository.folder / f"{chr(0x20AC) * 70}{number}").write_bytes(FIX)
    assert 10 < len(looked(repository.folder)) <= leak_probe.MAX_FINDINGS
    report = repository.folder.parent / "report.json"
    assert report.stat().st_size < 64 << 10
