"""Archives of files that are unpacked inside a sandbox: tar files of plain files and folders."""

import io
import tarfile

from etude.envserver.storage.trees import Tree


def pack_archive(tree: Tree) -> bytes:
    """Pack files by path. Owner and time are those of its unpacking."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, file in tree.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(file.content)
            entry.mode = 0o755 if file.executable else 0o644
            archive.addfile(entry, io.BytesIO(file.content))
    return data.getvalue()
