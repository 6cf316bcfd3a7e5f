"""Root file systems unpacked from fetched images.

Covered: layers cannot write outside the root, whatever their paths and links (umoci opens each
below it), device nodes, sockets and the right to become another user are removed, and size, number
of files and time are limited. Not covered: umoci and skopeo run as this process's user, so a fault
in their parsers is a fault here.
"""

import os
import stat
from pathlib import Path

from etude.common.pinned_images import PinnedImage
from etude.envserver.images.pull.bounded_program import FillLimits, fill_folder
from etude.envserver.images.pull.image_layout import TAG, fetch_layout
from etude.envserver.images.pull.registry_access import NO_ACCESS
from etude.envserver.storage.store_reads import DirectReads

_RIGHTS = stat.S_ISUID | stat.S_ISGID


def unpack_layout(layout: Path, tree: Path, *, limits: FillLimits) -> None:
    """Unpack the image of a fetched layout into a new folder, and remove what no guest may have.

    Raises:
        UserError: a layer is damaged, leaves the root, or exceeds a limit.
    """
    work = tree.parent / "unpacking"
    work.mkdir()
    # Only root may give files to others: without it all are root's in the packed image.
    options = () if os.geteuid() == 0 else ("--rootless",)
    words = ("umoci", "raw", "unpack", *options, "--image", f"{layout}:{TAG}", "tree")
    fill_folder(words, work, what="unpack", limits=limits)
    _remove_rights(work / "tree")
    (work / "tree").rename(tree)
    work.rmdir()


def unpack_local(layout: Path, digest: str, tree: Path) -> None:
    """Unpack one image of a layout on this machine into a new folder.

    Raises:
        UserError: the layout lacks something, or holds what does not belong into a root.
    """
    scratch = tree.parent / "fetched"
    scratch.mkdir()
    limits = FillLimits()
    image = PinnedImage(layout.resolve().as_uri(), digest)
    fetched = fetch_layout(image, scratch, registries=NO_ACCESS, reads=DirectReads(), limits=limits)
    unpack_layout(fetched, tree, limits=limits)


def _remove_rights(tree: Path) -> None:
    """Remove device nodes and sockets, and the bits that run a program as its owner."""
    for folder, _, names in os.walk(tree):
        for name in names:
            path = os.path.join(folder, name)  # noqa: PTH118 - millions of them
            mode = os.lstat(path).st_mode
            if stat.S_ISREG(mode):
                if mode & _RIGHTS:
                    os.chmod(path, stat.S_IMODE(mode) & ~_RIGHTS)  # noqa: PTH101
            elif not stat.S_ISLNK(mode):
                os.unlink(path)  # noqa: PTH108
