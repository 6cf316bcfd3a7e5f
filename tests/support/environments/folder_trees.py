"""Folders with all that a workspace may hold: files with holes, links, pipes, odd names."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from hypothesis import strategies as st

from etude.envserver.storage.folders import FolderLimits

LIMITS = FolderLimits(max_files=10_000, max_bytes=1 << 30)
NAMES = st.sampled_from(["a", "b", "c c", "ü", ".hidden"])
CONTENT = st.lists(
    st.sampled_from([bytes(1 << 16), b"\1" * 100, bytes(5000), b"x" * (1 << 16), b""]), max_size=4
).map(b"".join)
MODES = st.sampled_from([0o644, 0o755, 0o600, 0o000, 0o777])
ENTRIES = st.one_of(
    st.tuples(st.just("file"), CONTENT, MODES),
    st.tuples(st.just("link"), st.sampled_from([b"a", b"/etc/passwd", b"../../.."]), MODES),
    st.tuples(st.just("pipe"), st.just(b""), MODES),
)
TREES = st.dictionaries(st.lists(NAMES, min_size=1, max_size=3).map("/".join), ENTRIES, max_size=8)


def make(folder: Path, tree: Mapping[str, tuple[str, bytes, int]]) -> None:
    for path, (kind, content, mode) in sorted(tree.items()):
        at = folder / path
        if any(parent.exists() and not parent.is_dir() for parent in at.parents) or at.exists():
            continue
        if any(parent.is_symlink() for parent in at.parents) or at.is_symlink():
            continue
        at.parent.mkdir(parents=True, exist_ok=True)
        match kind:
            case "file":
                at.write_bytes(content)
                at.chmod(mode)
            case "link":
                at.symlink_to(os.fsdecode(content))
            case _:
                os.mkfifo(at)
                at.chmod(mode)


def listing(folder: Path) -> dict[str, tuple[int, bytes | str]]:
    found: dict[str, tuple[int, bytes | str]] = {}
    for root, names, files in os.walk(folder):
        for name in (*names, *files):
            path = Path(root, name)
            mode = path.lstat().st_mode
            what: bytes | str = b""
            if stat.S_ISLNK(mode):
                what = str(path.readlink())
            elif stat.S_ISREG(mode):
                what = path.read_bytes()
            found[str(path.relative_to(folder))] = mode, what
    return found
