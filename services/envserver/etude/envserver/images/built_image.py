"""Built images in the cache: their files and manifests."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from etude.common.errors import CorruptError
from etude.envserver.images.build_cache import BuildCache

MANIFEST = "manifest.json"
FILES = ("vmlinuz", "initramfs.gz", "root.sqsh")
FIRST_FILES = "workspace"
BASE = "base.pb"
MAX_MANIFEST_BYTES = 1 << 20
GUEST_VERSION = 2
"""Of the first file system that images are built with: 2 mounts a disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltImage:
    """A built image: the immutable files that a guest boots."""

    folder: Path
    name: str
    address: str
    """Digest of the spec and of the agent in it."""
    files: dict[str, str]
    """SHA-256 of each file, by name."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of its commands, of an image that says some."""
    has_services: bool = False
    """Whether something runs in it beside what an agent starts."""
    guest_version: int = GUEST_VERSION
    """Of its first file system; 1 if its manifest says none."""

    @property
    def kernel(self) -> Path:
        """The kernel, in the format that QEMU loads."""
        return self.folder / "vmlinuz"

    @property
    def initramfs(self) -> Path:
        """The initial RAM file system."""
        return self.folder / "initramfs.gz"

    @property
    def root(self) -> Path:
        """The root file system, read-only, shared by all guests."""
        return self.folder / "root.sqsh"

    @property
    def base(self) -> Path | None:
        """List of the files of its repository, where it was made from an image that has one."""
        return self.folder / BASE if (self.folder / BASE).is_file() else None

    @property
    def first_files(self) -> Path | None:
        """Copies of these files, the smallest first, within limits."""
        folder = self.folder / FIRST_FILES
        return folder if folder.is_dir() else None


def read_image(folder: Path) -> BuiltImage:
    """Read the image in a folder of the cache.

    Raises:
        CorruptError: its manifest is damaged.
    """
    path = folder / MANIFEST
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(MAX_MANIFEST_BYTES))
        name, files = found["name"], {str(k): str(v) for k, v in found["files"].items()}
        environment = {str(k): str(v) for k, v in found.get("environment", {}).items()}
        has_services = bool(found.get("spec", {}).get("services"))
        guest_version = int(found.get("guest", 1))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as cause:
        raise CorruptError(f"{path}: {cause}; remove the folder and build again") from cause
    return BuiltImage(
        folder=folder,
        name=str(name),
        address=folder.name,
        files=files,
        environment=environment,
        has_services=has_services,
        guest_version=guest_version,
    )


def list_images(cache: BuildCache, kind: str = "images") -> list[BuiltImage]:
    """List the images of a kind in the cache, oldest first, without those removed meanwhile.

    Raises:
        CorruptError: a manifest is damaged.
    """
    found = []
    for folder in cache.entries(kind):
        try:
            found.append(read_image(folder))
        except CorruptError:
            if folder.is_dir():
                raise
    return found


def newest_image(name: str, cache: BuildCache) -> BuiltImage | None:
    """The newest image of this name or address."""
    fitting = [each for each in list_images(cache) if name in {each.name, each.address}]
    return fitting[-1] if fitting else None
