"""Archives and changes as the reference agent does them: with tarfile, and by listing twice."""

import io
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path

from tests.support.reference_guest.calls import Call, Operation, RefusedError

from etude.agent.workspace import PathFault, WorkspaceError, relative_path
from etude.envserver.storage import base_files
from etude.v1 import environments_pb2, guest_pb2


async def _received(call: Call) -> bytes:
    data = bytearray()
    while (piece := await call.receive()) is not None:
        data += piece
    return bytes(data)


async def _apply(call: Call, _agent: object) -> None:
    root, asked = Path(call.folder), call.request.apply
    for path in asked.deleted:
        at = root / _clean(path)
        if at.is_file() or at.is_symlink():
            at.unlink()
        while at != root and (at := at.parent) != root and at.is_dir() and not any(at.iterdir()):
            at.rmdir()
    if asked.has_archive:
        with tarfile.open(fileobj=io.BytesIO(await _received(call))) as archive:
            for entry in archive:
                _unpack(root, archive, entry)


def _clean(path: str) -> str:
    try:
        if path and relative_path(path) == path:
            return path
    except WorkspaceError:
        pass
    raise WorkspaceError(PathFault.BAD_NAME, path)


def _unpack(root: Path, archive: tarfile.TarFile, entry: tarfile.TarInfo) -> None:
    is_clean = entry.name and not entry.name.startswith("/") and ".." not in entry.name.split("/")
    if not (entry.isfile() or entry.isdir()) or not is_clean:
        raise RefusedError(guest_pb2.GUEST_STATUS_INVALID, f"the archive's entry {entry.name!r}")
    target = root / entry.name
    for parent in reversed(target.relative_to(root).parents):
        at = root / parent
        if at.is_symlink() or at.is_file():
            at.unlink()
        at.mkdir(exist_ok=True)
    if entry.isdir():
        target.mkdir(exist_ok=True)
        return
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    target.unlink(missing_ok=True)
    content = archive.extractfile(entry)
    assert content is not None
    target.write_bytes(content.read())
    target.chmod(0o755 if entry.mode & 0o100 else 0o644)


async def _change(call: Call, _agent: object) -> None:
    asked = call.request.change
    before = base_files.decode_base(await _received(call))
    after = base_files.list_folder(Path(call.folder), tracked=before)
    diff = environments_pb2.WorkspaceDiff(deleted=[path for path in before if path not in after])
    for path, file in after.items():
        old = before.get(path)
        if old is not None and old._replace(mtime_ns=0) == file._replace(mtime_ns=0):
            continue
        content = (Path(call.folder) / path).read_bytes()
        diff.written.add(path=path, content=content, executable=file.executable)
    size = sum(len(file.content) for file in diff.written)
    if len(diff.written) + len(diff.deleted) > asked.max_files or size > asked.max_bytes:
        raise WorkspaceError(PathFault.TOO_MANY, "")
    await call.data(0, diff.SerializeToString())


CHANGES: Mapping[str, Operation] = {"apply": _apply, "change": _change}
"""What does each operation on many files at once."""
