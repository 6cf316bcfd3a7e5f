"""Repository that is mined: the files of its commit, and untracked files that its tests need."""

import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.common.errors import Problem, UserError
from etude.common.harbor.task import MAX_FILES, MAX_FOLDER_BYTES
from etude.envserver.storage import trees
from etude.envserver.storage.trees import File
from etude.envserver.tasks.formats import git_mirror


@dataclass(frozen=True, slots=True, kw_only=True)
class MinedRepository:
    """Files of one commit and what their tests need."""

    name: str
    commit: str
    files: dict[str, File]
    """Files of the commit."""
    dependencies: dict[str, File]
    """Untracked files that are copied into each task."""

    digest: str
    """Identity of all files."""

    @property
    def workspace(self) -> dict[str, File]:
        return self.dependencies | self.files


def read_repository(folder: Path, dependencies: Sequence[str]) -> MinedRepository:
    """Read the checked-out commit of a repository.

    Args:
        folder: of its work tree; changes that are not committed do not count.
        dependencies: folders in it that git ignores and tests need. Links in them are left out.

    Raises:
        UserError: it is no repository, holds nothing, or more than a task may.
    """
    commit = _head(folder)
    with tempfile.TemporaryDirectory(prefix="etude-mine-") as scratch:
        checkout = git_mirror.open_mirror(folder, Path(scratch)).checkout(commit)
    found = dict(_dependencies(folder, dependencies))
    return MinedRepository(
        name=folder.resolve().name,
        commit=commit,
        files=checkout.files,
        dependencies=found,
        digest=trees.tree_identity(found | checkout.files),
    )


def _head(folder: Path) -> str:
    words = ["git", "-C", str(folder), "rev-parse", "--verify", "--quiet", "HEAD^{commit}"]
    done = subprocess.run(words, capture_output=True, check=False, text=True)
    if done.returncode or not (folder / ".git").exists():
        what = "is not the root of a git repository with a commit"
        fix = "name its root; without a history: git init && git add -A && git commit"
        raise UserError(Problem("InvalidRepository", what, str(folder), fix))
    return done.stdout.strip()


def _dependencies(folder: Path, names: Sequence[str]) -> Iterator[tuple[str, File]]:
    num_files = num_bytes = 0
    for name in names:
        root = folder / name
        if not root.is_dir() or root.is_symlink() or not _is_inside(root, folder):
            what = "is no folder inside of the repository"
            raise UserError(Problem("NotFound", what, f"--with {name}", "name one below REPO"))
        for path in _walk(root):
            num_files += 1
            num_bytes += path.stat().st_size
            if num_files > MAX_FILES or num_bytes > MAX_FOLDER_BYTES:
                what = f"holds more than {MAX_FILES} files or {MAX_FOLDER_BYTES} bytes"
                fix = "leave out what tests do not need, or build an image and name it with --image"
                raise UserError(Problem("TooLarge", what, f"--with {name}", fix))
            mode = path.stat().st_mode
            yield path.relative_to(folder).as_posix(), File(path.read_bytes(), bool(mode & 0o100))


def _is_inside(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve()) and path.resolve() != folder.resolve()


def _walk(folder: Path) -> Iterator[Path]:
    """Regular files below a folder in order, without compiled Python, which may be stale."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(each for each in folders if each not in {"__pycache__", ".git"})
        for name in sorted(names):
            path = Path(parent, name)
            if path.is_file() and not path.is_symlink():
                yield path
