"""Probe for leaks of a task: runs inside a sandbox, over files that may be hostile.

    python3 /tests/probe.py [WORKSPACE [REPORT]]

Reads units.json next to itself: {"hashes": {sha256: name}, "units": [{"rule", "name", "lines",
"needed", "exempt"}], "keeps_history": false}. A unit is given away where one file or git object
holds as many of its lines as are needed. Files below extra/ next to this one count as the image's.
The report is JSON: {"findings": [{"rule", "where", "what"}], "scanned": number}.

Git runs with no configuration but the repository's own, no hooks, no other protocol, no lazy
fetch; what a hostile repository makes it do stays in the sandbox. Standard library only.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_FINDINGS = 100
MAX_REPORT_BYTES = 60_000
"""Sandboxes hand out files up to 64 KiB."""
MAX_SCANNED_BYTES = 64 << 20
"""A larger object is a finding: nothing here is that large."""
GIT_LIMIT_S = 120
_SAFE = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "core.attributesFile": "/dev/null",
    "core.pager": "cat",
    "core.sshCommand": "false",
    "protocol.allow": "never",
    "safe.directory": "*",
    "gc.auto": "0",
    "maintenance.auto": "false",
}


class LeakProbe:
    """Collects the leaks of a workspace."""

    def __init__(self, units: dict[str, Any]) -> None:
        self.findings: list[dict[str, str]] = []
        self.scanned = 0
        self._hashes: dict[str, str] = units["hashes"]
        self._keeps_history: bool = units["keeps_history"]
        self._units = [
            (unit, {line.encode() for line in unit["lines"]}, set(unit["exempt"]), _hints(unit))
            for unit in units["units"]
        ]

    def add(self, rule: str, where: str, what: str) -> None:
        """Record one finding."""
        if len(self.findings) < MAX_FINDINGS:
            found = {"rule": rule, "where": where[:300], "what": what[:300]}
            if found not in self.findings:
                self.findings.append(found)

    def report(self) -> str:
        """The findings as JSON, as many as fit into a small file."""
        while True:
            text = json.dumps({"findings": self.findings, "scanned": self.scanned})
            if len(text) <= MAX_REPORT_BYTES:
                return text
            self.findings.pop()

    def compare_digest(self, where: str, digest: str) -> None:
        """Compare the SHA-256 of one file or object with those of hidden files."""
        self.scanned += 1
        if digest in self._hashes:
            name = self._hashes[digest]
            self.add("hidden-file", where, f"is {name}, which the agent must not see")

    def content(self, where: str, data: bytes) -> None:
        """Compare one file or object with what has to stay hidden."""
        digest = hashlib.sha256(data).hexdigest()
        self.compare_digest(where, digest)
        # A patch begins its lines with a sign; JSON spells line ends and quotes with a backslash.
        plain = data.replace(b"\\n", b"\n").replace(b'\\"', b'"') if b"\\n" in data else data
        near = [
            each
            for each in self._units
            if digest not in each[2] and any(hint in data or hint in plain for hint in each[3])
        ]
        rows = [line.strip() for text in (data, plain) for line in text.split(b"\n") if near]
        lines = {*rows, *(row[1:].strip() for row in rows if row.startswith(b"+"))}
        for unit, wanted, _, _ in near:
            hits = wanted & lines
            if len(hits) >= unit["needed"]:
                example = min(hits).decode(errors="replace")
                what = f"has {len(hits)} of {len(wanted)} lines of {unit['name']}: {example!r}"
                self.add(unit["rule"], where, what)

    def folder(self, root: Path, prefix: str) -> None:
        """Compare every file below a folder."""
        for path in files(root):
            where = prefix + path.relative_to(root).as_posix()
            if path.stat().st_size > MAX_SCANNED_BYTES:
                self.add("unreadable", where, "is too large to be looked at")
            else:
                self.content(where, path.read_bytes())

    def repository(self, folder: Path, where: str) -> None:
        """Look for history and objects that a repository of one commit does not have."""
        # A tree of files has no empty folders, without which git sees no repository.
        for name in ("refs", "objects"):
            (folder / name).mkdir(exist_ok=True)
        self._loose_ends(folder, where)
        git = GitRepository(folder)
        try:
            self._history(git, where)
            self._objects(git, where)
        except (subprocess.SubprocessError, OSError, ValueError) as error:
            self.add("unreadable", where, f"git cannot look at it: {error}")

    def _loose_ends(self, folder: Path, where: str) -> None:
        for name in ("objects/info/alternates", "objects/info/http-alternates", "info/grafts"):
            path = folder / name
            if path.is_file():
                self.add("stray-objects", f"{where}/{name}", "leads to objects from elsewhere")
                path.unlink()
        for path in files(folder / "logs"):
            if path.stat().st_size:
                self.add("reflog", f"{where}/{path.relative_to(folder)}", "names earlier commits")

    def _history(self, git: "GitRepository", where: str) -> None:
        branch = git.text("symbolic-ref", "-q", "HEAD", fails=True).strip()
        for ref in git.text("for-each-ref", "--format=%(refname)").split():
            if ref != branch:
                self.add("refs", where, f"has {ref} beside the branch that is checked out")
        for line in git.text("config", "--local", "--get-regexp", r"^remote\.", fails=True).split(
            "\n"
        ):
            if line:
                self.add("remotes", where, f"has a remote: {line}")
        head = git.text("rev-parse", "-q", "--verify", "HEAD^{commit}", fails=True).strip()
        future = git.text("rev-list", "--all", *(("--not", head) if head else ()))
        for commit in future.split()[:5]:
            self.add("future", where, f"has the commit {commit}, which is no ancestor of HEAD")
        count = int(git.text("rev-list", "--count", head)) if head else 0
        if count > 1 and not self._keeps_history:
            what = f"has {count} commits; one is enough, or set metadata.etude_keeps_history"
            self.add("history", where, what)

    def _objects(self, git: "GitRepository", where: str) -> None:
        found = git.text("fsck", "--unreachable", "--no-reflogs", "--no-progress", fails=True)
        for line in [each for each in found.splitlines() if each][:5]:
            self.add("stray-objects", where, f"git fsck says: {line}")
        for name, data in git.objects():
            self.content(f"{where}: object {name}", data)


def _hints(unit: dict[str, Any]) -> list[bytes]:
    """Lines of a unit, one of which is in whatever holds enough of them; the longest are rare."""
    ordered = sorted((line.encode() for line in unit["lines"]), key=len, reverse=True)
    return ordered[: len(ordered) - unit["needed"] + 1]


class GitRepository:
    """Git in one repository."""

    def __init__(self, folder: Path) -> None:
        values = {
            "GIT_DIR": str(folder),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_ALLOW_PROTOCOL": "none",
            "GIT_NO_LAZY_FETCH": "1",
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_OPTIONAL_LOCKS": "0",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_CONFIG_COUNT": str(len(_SAFE)),
        }
        for number, (key, value) in enumerate(_SAFE.items()):
            values[f"GIT_CONFIG_KEY_{number}"] = key
            values[f"GIT_CONFIG_VALUE_{number}"] = value
        self._environment = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), **values}
        self._folder = folder

    def text(self, *words: str, fails: bool = False) -> str:
        """Output of a git command.

        Raises:
            ValueError: it fails, and may not.
        """
        done = subprocess.run(
            ["git", *words],  # noqa: S607 - the sandbox's own
            env=self._environment,
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=GIT_LIMIT_S,
        )
        if done.returncode and not fails:
            tail = done.stderr[-200:].decode(errors="replace").strip()
            raise ValueError(f"{words[0]}: {tail}")
        return done.stdout.decode(errors="replace")

    def objects(self) -> Iterator[tuple[str, bytes]]:
        """Name and content of every blob, commit and tag that is stored, reachable or not.

        Raises:
            ValueError: the answer is none of git's.
        """
        words = ["git", "cat-file", "--batch-all-objects", "--batch", "--buffer", "--unordered"]
        with subprocess.Popen(
            words,
            env=self._environment,
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            out = process.stdout
            while out is not None and (header := out.readline().split()):
                if len(header) != 3 or int(header[2]) > MAX_SCANNED_BYTES:
                    process.kill()
                    raise ValueError(f"object {header[0].decode(errors='replace')} is no usual one")
                data = out.read(int(header[2]) + 1)[:-1]
                if header[1] != b"tree":
                    yield header[0].decode(), data
        if process.returncode:
            raise ValueError("its objects are damaged")


def files(root: Path) -> Iterator[Path]:
    """Every regular file below a folder."""
    for folder, folders, names in os.walk(root):
        folders.sort()
        for name in sorted(names):
            path = Path(folder, name)
            if path.is_file() and not path.is_symlink():
                yield path


def repositories(root: Path) -> Iterator[Path]:
    """Every folder that git would take for a repository, once it has its empty folders."""
    for folder, _, names in os.walk(root):
        path = Path(folder)
        begins = {"config", "packed-refs"} & {*names} or (path / "refs").is_dir()
        if "HEAD" in names and (begins or (path / "objects").is_dir()):
            yield path


def main(arguments: list[str]) -> int:
    """Look, and write the report."""
    workspace = Path(arguments[0] if arguments else "/workspace")
    report = Path(arguments[1] if len(arguments) > 1 else "/logs/report.json")
    probe = LeakProbe(json.loads(Path(__file__).with_name("units.json").read_bytes()))
    probe.folder(workspace, "environment/")
    probe.folder(Path(__file__).with_name("extra"), "image.yaml: ")
    for folder in repositories(workspace):
        probe.repository(folder, "environment/" + folder.relative_to(workspace).as_posix())
    report.write_text(probe.report())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
