"""Hygiene of first files: caches, histories and commits that hold answers of a task.

Covered: compiled code, caches of type checkers, test runners and language servers, coverage
reports, build output, histories of shells and editors, and every commit but one. Not covered: a
solution that lies in a file of its own: `etude tasks lint` finds it by its lines.
"""

import hashlib
import struct
import zlib
from collections.abc import Iterator

from etude.agent import patterns
from etude.envserver.storage.trees import File, Tree

LEFTOVERS = (
    "**/__pycache__/**",
    "**/{.mypy_cache,.pytest_cache,.ruff_cache,.pytype,.pyre,.hypothesis,.tox,.nox}/**",
    "**/{.coverage,.coverage.*,coverage.xml,lcov.info,.dmypy.json}",
    "**/{htmlcov,.nyc_output}/**",
    "**/.cache/**",
    "**/{.jedi,.clangd,.ccls-cache,.vscode-server,.idea}/**",
    "**/{tags,TAGS,GTAGS,GRTAGS,GPATH,.tags}",
    "**/build/{lib,lib.*,bdist.*}/**",
    "**/dist/*.{whl,tar.gz,zip}",
    "**/*.{swp,swo,swn,orig,rej}",
    "**/*~",
    "**/{.bash_history,.zsh_history,.python_history,.node_repl_history,.viminfo,.lesshst}",
)
"""Patterns of what programs leave behind and no task needs."""
_GIT = ".git/"
_AUTHOR = "Etude <tasks@etude.invalid> 0 +0000"
_CONFIG = b"[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = false\n"
_IN_INDEX, _EXECUTABLE = 0o100644, 0o100755


def remove_leftovers(tree: Tree) -> dict[str, File]:
    """A tree without what programs left behind; a repository keeps its own files."""
    matchers = [patterns.glob_matcher(glob) for glob in LEFTOVERS]
    return {
        path: file
        for path, file in tree.items()
        if path.startswith(_GIT)
        or not any(m.fullmatch(path.encode("utf-8", "surrogateescape")) for m in matchers)
    }


def cut_history(tree: Tree) -> dict[str, File]:
    """A tree whose repository, if it has one, is replaced by one with a single commit."""
    files = {path: file for path, file in tree.items() if not path.startswith(_GIT)}
    if len(files) == len(tree):
        return files
    return files | dict(_repository(files))


def clean_first_files(tree: Tree, *, keeps_history: bool = False) -> dict[str, File]:
    """First files as an agent may see them."""
    clean = remove_leftovers(tree)
    return clean if keeps_history else cut_history(clean)


def _repository(files: Tree) -> Iterator[tuple[str, File]]:
    """Files of a repository whose one commit has these files."""
    objects = dict[bytes, bytes]()
    blobs = {path: _add(objects, b"blob", file.content) for path, file in files.items()}
    root = _add_tree(objects, files, blobs, "")
    text = f"tree {root.hex()}\nauthor {_AUTHOR}\ncommitter {_AUTHOR}\n\nFirst files\n"
    commit = _add(objects, b"commit", text.encode())
    yield f"{_GIT}HEAD", File(b"ref: refs/heads/main\n")
    yield f"{_GIT}config", File(_CONFIG)
    yield f"{_GIT}refs/heads/main", File(f"{commit.hex()}\n".encode())
    yield f"{_GIT}index", File(_index(files, blobs))
    for digest, data in objects.items():
        name = digest.hex()
        yield f"{_GIT}objects/{name[:2]}/{name[2:]}", File(zlib.compress(data))


def _add(objects: dict[bytes, bytes], kind: bytes, content: bytes) -> bytes:
    data = b"%s %d\0%s" % (kind, len(content), content)
    digest = hashlib.sha1(data, usedforsecurity=False).digest()
    objects[digest] = data
    return digest


def _add_tree(
    objects: dict[bytes, bytes], files: Tree, blobs: dict[str, bytes], prefix: str
) -> bytes:
    entries = dict[bytes, tuple[bytes, bytes, bytes]]()
    for path, file in files.items():
        if not path.startswith(prefix):
            continue
        name, slash, _ = path[len(prefix) :].partition("/")
        encoded = name.encode("utf-8", "surrogateescape")
        if not slash:
            mode = b"100755" if file.executable else b"100644"
            entries[encoded] = (mode, encoded, blobs[path])
        elif encoded + b"/" not in entries:
            below = _add_tree(objects, files, blobs, f"{prefix}{name}/")
            entries[encoded + b"/"] = (b"40000", encoded, below)
    rows = (b"%s %s\0%s" % entries[key] for key in sorted(entries))
    return _add(objects, b"tree", b"".join(rows))


def _index(files: Tree, blobs: dict[str, bytes]) -> bytes:
    """Git's list of tracked files, version 2, without times: git compares the contents once."""
    paths = sorted(files, key=lambda path: path.encode("utf-8", "surrogateescape"))
    data = struct.pack(">4sII", b"DIRC", 2, len(paths))
    for path in paths:
        file, name = files[path], path.encode("utf-8", "surrogateescape")
        mode = _EXECUTABLE if file.executable else _IN_INDEX
        numbers = (0, 0, 0, 0, 0, 0, mode, 0, 0, len(file.content) & 0xFFFFFFFF)
        entry = struct.pack(">10I20sH", *numbers, blobs[path], min(len(name), 0xFFF)) + name
        data += entry + b"\0" * (8 - len(entry) % 8)
    return data + hashlib.sha1(data, usedforsecurity=False).digest()
