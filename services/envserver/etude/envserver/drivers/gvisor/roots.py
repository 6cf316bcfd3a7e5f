"""Root file systems of images, unpacked once."""

import asyncio
import functools
import shutil
from pathlib import Path

from etude.envserver.images import host_programs
from etude.envserver.images.build_cache import Cache
from etude.envserver.images.built_image import Image

_LIMIT_S = 900.0


async def unpacked(image: Image, scratch: Path) -> Path:
    """Unpack an image's root, read-only for all.

    Raises:
        UserError: unsquashfs is missing or failed.
    """
    cache = Cache(scratch / "roots")
    build = functools.partial(_unpack, image)
    entry = await asyncio.to_thread(cache.entry, "root", image.address, build)
    return entry / "root"


def prune(scratch: Path, used: set[str]) -> None:
    """Remove the roots of images that no template names any more."""
    for entry in Cache(scratch / "roots").entries("root"):
        if entry.name not in used:
            shutil.rmtree(entry)


def _unpack(image: Image, folder: Path) -> None:
    words = ("unsquashfs", "-no-progress", "-quiet", "-dest", str(folder / "root"), str(image.root))
    host_programs.run(words, what="root", cwd=folder, timeout_s=_LIMIT_S)
    for name in ("tests", "logs", "var/tmp"):
        (folder / "root" / name).mkdir(parents=True, exist_ok=True)
    # Whatever the umask is; the folders above it belong to root alone.
    (folder / "root").chmod(0o755)
