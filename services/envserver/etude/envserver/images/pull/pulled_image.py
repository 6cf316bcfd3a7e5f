"""Images that tasks name by digest, converted once on each machine.

A pool's template gives the machine (kernel, initramfs, agent), the task's image the root file
system. The image's working folder becomes /workspace: what was in it is the first files.

pulled/<address>/root.sqsh       the root, without the working folder's content
                /vmlinuz, …      of the template
                /workspace/      what the working folder held
                /manifest.json   as of other images
"""

import contextlib
import functools
import hashlib
import json
import os
import posixpath
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from etude.common.api.storage import StoreAccess
from etude.common.harbor.task_file import WORKSPACE
from etude.common.pinned_images import InvalidImageError, PinnedImage
from etude.envserver.images import built_image
from etude.envserver.images.build_cache import BuildCache
from etude.envserver.images.built_image import FILES, FIRST_FILES, MANIFEST, BuiltImage
from etude.envserver.images.host_programs import SQUASHFS_OPTIONS, run_program
from etude.envserver.images.initramfs import AGENT
from etude.envserver.images.pull import image_config, image_layout, unpacking
from etude.envserver.images.pull.bounded_program import FillLimits, fill_folder, measure_folder
from etude.envserver.images.pull.registry_access import NO_ACCESS, RegistryAccess

_FORMAT = 2
"""Raised when the same image is converted into another one."""
KIND = "pulled"
"""Folder of converted images in the cache."""
_MOUNT_POINTS = ("dev", "proc", "sys", "run", "tmp", "var/tmp", "tests", "logs")
"""Folders that every guest and container mounts something on."""
_AGENT_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePuller:
    """Pulls and converts images into a cache."""

    cache: BuildCache
    registries: RegistryAccess = NO_ACCESS
    store: StoreAccess = field(default_factory=StoreAccess)
    """Access to OCI layouts in an object store."""
    limits: FillLimits = field(default_factory=FillLimits)

    def find(self, image: PinnedImage, machine: BuiltImage) -> BuiltImage | None:
        """The converted image, if it is in the cache."""
        found = self.cache.find(KIND, pulled_address(image, machine))
        return None if found is None else built_image.read_image(found)

    def pull(self, image: PinnedImage, machine: BuiltImage) -> BuiltImage:
        """Pull and convert an image, unless it is in the cache. Takes minutes: call it on a thread.

        Args:
            image: its root file system.
            machine: gives kernel, initramfs and agent.

        Raises:
            UserError: it cannot be had, is not what its digest says, or exceeds a limit.
            CorruptError: the cache is damaged.
        """
        address = pulled_address(image, machine)
        fill = functools.partial(self._fill, image, machine)
        return built_image.read_image(self.cache.entry(KIND, address, fill))

    def _fill(self, image: PinnedImage, machine: BuiltImage, folder: Path) -> None:
        with self.cache.scratch() as scratch:
            layout = image_layout.fetch_layout(
                image, scratch, registries=self.registries, store=self.store, limits=self.limits
            )
            config = image_config.parse_config(image_layout.image_config(layout))
            tree = scratch / "tree"
            unpacking.unpack_layout(layout, tree, limits=self.limits)
            shutil.rmtree(layout)
            user = image_config.adopt_user(tree, config.user)
            _split_workspace(tree, config.working_folder, folder / FIRST_FILES)
            _add_machine(tree, machine, scratch)
            _pack(tree, folder, self.limits)
        for name in FILES:
            if name != "root.sqsh":
                _share(machine.folder / name, folder / name)
        files = {**{name: machine.files[name] for name in FILES}, "root.sqsh": _sha256(folder)}
        environment = {**user, **config.environment}
        manifest = {"name": str(image), "files": files, "environment": environment}
        (folder / MANIFEST).write_text(json.dumps(manifest) + "\n", encoding="utf-8")


def pulled_address(image: PinnedImage, machine: BuiltImage) -> str:
    """Address of a converted image: of its content and its machine, not of where it came from."""
    made_of = f"{_FORMAT} {image.digest} {machine.address}"
    return hashlib.sha256(made_of.encode()).hexdigest()[:32]


def own_bytes(folder: Path) -> int:
    """Disk space of a converted image, without the template's files, which it shares."""
    shared = 0
    for name in FILES:
        with contextlib.suppress(FileNotFoundError):
            found = (folder / name).stat()
            shared += 512 * found.st_blocks if found.st_nlink > 1 else 0
    return measure_folder(folder, FillLimits()).num_bytes - shared


def _split_workspace(tree: Path, name: str, target: Path) -> None:
    """Move the working folder's content out of the root, and have its name lead to /workspace.

    Raises:
        InvalidImageError: it is a link, or the image has another /workspace.
    """
    target.mkdir()
    if not name:
        name = WORKSPACE.lstrip("/")
    source = _inside(tree, name)
    if source.is_symlink():
        fix = "name the folder itself, not a link to it, in WORKDIR"
        raise InvalidImageError("image", f"its working folder {name!r} is a link", fix)
    if source.is_dir():
        target.rmdir()
        source.rename(target)
    workspace = _inside(tree, WORKSPACE.lstrip("/"))
    if f"/{name}" != WORKSPACE:
        source.parent.mkdir(parents=True, exist_ok=True)
        source.symlink_to(WORKSPACE)
        if workspace.is_symlink() or workspace.exists():
            fix = "make /workspace the image's WORKDIR, or leave it out of the image"
            raise InvalidImageError("image", f"it has {WORKSPACE} beside its working folder", fix)
    workspace.mkdir()


def _add_machine(tree: Path, machine: BuiltImage, scratch: Path) -> None:
    """Add the agent of the template's root, and the folders that mounts need."""
    for name in (*_MOUNT_POINTS, posixpath.dirname(AGENT).lstrip("/")):
        _inside(tree, f"{name}/any").parent.mkdir(parents=True, exist_ok=True)
    _inside(tree, "tmp/any").parent.chmod(0o1777)
    part = AGENT.lstrip("/")
    words = ("unsquashfs", "-no-progress", "-quiet", "-dest", "agent", str(machine.root), part)
    run_program(words, what="agent", cwd=scratch, timeout_s=_AGENT_LIMIT_S)
    agent = _inside(tree, part)
    agent.unlink(missing_ok=True)
    shutil.copyfile(scratch / "agent" / part, agent)
    agent.chmod(0o755)
    tree.chmod(0o755)


def _pack(tree: Path, folder: Path, limits: FillLimits) -> None:
    # Without extended attributes: one of them gives a program the rights of root.
    options = [*SQUASHFS_OPTIONS, "-no-xattrs"]
    options += [] if os.geteuid() == 0 else ["-all-root"]
    words = ("mksquashfs", str(tree), str(folder / "root.sqsh"), *options)
    fill_folder(words, folder, what="squashfs", limits=limits)
    (folder / "root.sqsh").chmod(0o644)


def _share(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        target.chmod(0o644)


def _sha256(folder: Path) -> str:
    with (folder / "root.sqsh").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _inside(tree: Path, name: str) -> Path:
    """A path of the root whose folder is really in it.

    Raises:
        InvalidImageError: a link leads out.
    """
    path = tree / name
    # Absolute links mean the image's own root, but here they would lead into the host's.
    if not path.parent.resolve().is_relative_to(tree.resolve()):
        fix = "make the link relative, or leave it out of the image"
        raise InvalidImageError("image", f"{name!r} leads through a link out of the root", fix)
    return path
