"""Images that tasks name by digest, converted once on each machine.

A pool's template gives the machine (kernel, initramfs, agent), the task's image the root file
system. The image's working folder is the workspace: it stays where it is, belongs to the user of
commands, and /workspace leads to it.

pulled/<address>/root.sqsh       the root
                /vmlinuz, …      of the template
                /base.pb         list of the files that changes are compared with
                /workspace/      copies of these, the smallest first, within limits
                /manifest.json   as of other images
"""

import contextlib
import functools
import hashlib
import json
import os
import posixpath
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from etude.common.harbor.task_file import WORKSPACE
from etude.common.pinned_images import InvalidImageError, PinnedImage
from etude.envserver.images import built_image
from etude.envserver.images.build_cache import BuildCache
from etude.envserver.images.built_image import BASE, FILES, FIRST_FILES, MANIFEST, BuiltImage
from etude.envserver.images.host_programs import SQUASHFS_OPTIONS, run_program
from etude.envserver.images.initramfs import AGENT
from etude.envserver.images.pull import image_config, image_layout, unpacking
from etude.envserver.images.pull.bounded_program import FillLimits, fill_folder, measure_folder
from etude.envserver.images.pull.registry_access import NO_ACCESS, RegistryAccess
from etude.envserver.isolation.sandbox_layout import INSIDE_UID
from etude.envserver.storage import base_files, git_index
from etude.envserver.storage.folders import FolderLimits
from etude.envserver.storage.store_reads import DirectReads, StoreReads

_FORMAT = 2
"""Raised when the same image is converted into another one."""
KIND = "pulled"
"""Folder of converted images in the cache."""
_MOUNT_POINTS = ("dev", "proc", "sys", "run", "tmp", "var/tmp", "tests", "logs")
"""Folders that every guest and container mounts something on."""
_PLAIN = re.compile(r"[A-Za-z0-9._+@/-]*")
MAX_COPIES = FolderLimits(max_files=20_000, max_bytes=64 << 20)
"""Limits on the files of a repository that a host has at hand: for searches, and to grade by."""
_AGENT_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePuller:
    """Pulls and converts images into a cache."""

    cache: BuildCache
    registries: RegistryAccess = NO_ACCESS
    reads: StoreReads = field(default_factory=DirectReads)
    """Of OCI image layouts."""
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
                image, scratch, registries=self.registries, reads=self.reads, limits=self.limits
            )
            config = image_config.parse_config(image_layout.image_config(layout))
            tree = scratch / "tree"
            unpacking.unpack_layout(layout, tree, limits=self.limits)
            shutil.rmtree(layout)
            user = image_config.adopt_user(tree, config.user)
            workspace = _place_workspace(tree, config.working_folder)
            _list_base(workspace, folder)
            _add_machine(tree, machine, scratch)
            _pack(tree, str(workspace.relative_to(tree)), folder, self.limits)
        for name in FILES:
            if name != "root.sqsh":
                _share(machine.folder / name, folder / name)
        files = {**{name: machine.files[name] for name in FILES}, "root.sqsh": _sha256(folder)}
        environment = {**user, **config.environment}
        manifest = {
            "name": str(image),
            "files": files,
            "environment": environment,
            "guest": machine.guest_version,
        }
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


def _place_workspace(tree: Path, name: str) -> Path:
    """Give the working folder to the user of commands, and have /workspace lead to it.

    Raises:
        InvalidImageError: it is a link, or the image has another /workspace.
    """
    workspace = _inside(tree, WORKSPACE.lstrip("/"))
    source = _inside(tree, name) if name else workspace
    if source.is_symlink():
        fix = "name the folder itself, not a link to it, in WORKDIR"
        raise InvalidImageError("image", f"its working folder {name!r} is a link", fix)
    source.mkdir(parents=True, exist_ok=True)
    if source != workspace:
        if workspace.is_symlink() or workspace.exists():
            fix = "make /workspace the image's WORKDIR, or leave it out of the image"
            raise InvalidImageError("image", f"it has {WORKSPACE} beside its working folder", fix)
        workspace.symlink_to(f"/{name}")
    for parent in source.relative_to(tree).parents:
        # A folder such as /root is closed to the user of commands.
        (tree / parent).chmod((tree / parent).stat().st_mode | 0o111)
    return source


def _list_base(workspace: Path, folder: Path) -> None:
    """List the files of a repository, and copy them, the smallest first, within limits."""
    tracked = git_index.tracked_paths(workspace)
    # squashfs keeps whole seconds.
    files = base_files.list_folder(workspace, tracked=tracked, keeps_ns=False)
    (folder / BASE).write_bytes(base_files.encode_base(files))
    (folder / FIRST_FILES).mkdir()
    left = MAX_COPIES.max_bytes
    for path in sorted(files, key=lambda each: files[each].size)[: MAX_COPIES.max_files]:
        left -= files[path].size
        if left < 0:
            break
        target = folder / FIRST_FILES / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(workspace / path, target, follow_symlinks=False)
        target.chmod(0o755 if files[path].executable else 0o644)


def _add_machine(tree: Path, machine: BuiltImage, scratch: Path) -> None:
    """Add the agent of the template's root, and the folders that mounts need."""
    for name in (*_MOUNT_POINTS, posixpath.dirname(AGENT).lstrip("/")):
        _inside(tree, f"{name}/any").parent.mkdir(parents=True, exist_ok=True)
    for name in ("tmp", "var/tmp"):
        _inside(tree, f"{name}/any").parent.chmod(0o1777)
    part = AGENT.lstrip("/")
    words = ("unsquashfs", "-no-progress", "-quiet", "-dest", "agent", str(machine.root), part)
    run_program(words, what="agent", cwd=scratch, timeout_s=_AGENT_LIMIT_S)
    agent = _inside(tree, part)
    agent.unlink(missing_ok=True)
    shutil.copyfile(scratch / "agent" / part, agent)
    agent.chmod(0o755)
    tree.chmod(0o755)


def _pack(tree: Path, workspace: str, folder: Path, limits: FillLimits) -> None:
    """Pack the root; the workspace becomes the property of the user of commands."""
    # Without extended attributes: one of them gives a program the rights of root.
    options = [*SQUASHFS_OPTIONS, "-no-xattrs"]
    if os.geteuid() != 0:
        options += ["-action", "guid(0,0)@true"]
    owner = f"guid({INSIDE_UID},{INSIDE_UID})"
    for test in ("pathname", "subpathname"):
        options += ["-action", f"{owner}@{test}({workspace})"]
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
