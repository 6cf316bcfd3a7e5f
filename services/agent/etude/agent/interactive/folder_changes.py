"""Changes between two states of a folder, as a patch that `git apply` takes."""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from etude.agent.interactive.user_files import UserFile, run_git
from etude.agent.workspace import WorkspaceError, relative_path
from etude.common.errors import Problem, UserError

_ENVIRONMENT = {
    "HOME": "/nonexistent",
    "LC_ALL": "C",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_ATTR_NOSYSTEM": "1",
}
"""Without filters, hooks and conversions of the user: the patch has the bytes of the files."""
_NO_CONVERSION = "* -text -filter -ident !working-tree-encoding\n"
"""Attributes above all those that the files name."""
_DIFF = ("diff", "--cached", "--no-renames", "--no-ext-diff", "--no-textconv")


class FileChange(NamedTuple):
    """Change of one file; None stands for no file."""

    path: str
    before: UserFile | None
    after: UserFile | None


class FolderChanges(NamedTuple):
    """Changes of a folder."""

    patch: bytes
    files: tuple[FileChange, ...]


def compare_folders(before: Mapping[str, UserFile], after: Mapping[str, UserFile]) -> FolderChanges:
    """Compare two states of a folder, without new files that its .gitignore files name.

    Args:
        before: files of the user, by path.
        after: the same after the work of a policy, which may have chosen any name and content.

    Raises:
        UserError: a name is not possible in the folder, or git fails.
    """
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    _check_paths(changed)
    rules = {path for path in before.keys() | after.keys() if path.endswith(".gitignore")}
    with tempfile.TemporaryDirectory(prefix="etude-patch-") as scratch:
        folder = Path(scratch)
        _run(folder, "init", "--quiet", "--template=", ".")
        (folder / ".git/info").mkdir()
        (folder / ".git/info/attributes").write_text(_NO_CONVERSION)
        _write(folder, before, changed | rules)
        _run(folder, "add", "--all", "--force", ".")
        tree = _run(folder, "write-tree").decode().strip()
        _empty(folder)
        _write(folder, after, changed | rules)
        _run(folder, "add", "--all", ".")
        patch = _run(folder, *_DIFF, "--binary", "--full-index", tree)
        names = _run(folder, *_DIFF, "--name-only", "-z", tree).decode().split("\0")
    files = tuple(FileChange(each, before.get(each), after.get(each)) for each in names if each)
    return FolderChanges(patch, files)


def _check_paths(paths: set[str]) -> None:
    """Check names that a hostile program may have chosen.

    Raises:
        UserError: one leaves the folder, or is in a folder of git, whose settings run programs.
    """
    for path in paths:
        try:
            is_possible = relative_path(path) == path
        except WorkspaceError:
            is_possible = False
        if not is_possible or any(_is_of_git(part) for part in path.split("/")):
            what = f"the work changed {path[:200]!r}, which no patch may change"
            fix = "do the work again, or in a folder without this name"
            raise UserError(Problem("InvalidArgument", what, "patch", fix))


def _is_of_git(name: str) -> bool:
    """True for names of git's folder, also on file systems that ignore case."""
    return name.casefold() in {".git", "git~1"}


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != ".git":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _write(folder: Path, files: Mapping[str, UserFile], paths: set[str]) -> None:
    for path in sorted(paths & files.keys()):
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(files[path].content)
        target.chmod(0o755 if files[path].is_executable else 0o644)


def _run(folder: Path, *words: str) -> bytes:
    """Run git; returns its output.

    Raises:
        UserError: it fails.
    """
    done = run_git(folder, words, environment=_ENVIRONMENT)
    if done.returncode:
        what = f"git {words[0]}: {done.stderr.decode('utf-8', 'replace').strip()[:500]}"
        fix = "look at what it says; the work itself is done"
        raise UserError(Problem("InvalidArgument", what, "patch", fix))
    return done.stdout
