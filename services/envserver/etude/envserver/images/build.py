"""From a spec to an image in the cache."""

import functools
import hashlib
import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from etude.common.errors import CorruptError
from etude.envserver.images import bases, kernel, programs
from etude.envserver.images.cache import Cache
from etude.envserver.images.confined import PlacedFile
from etude.envserver.images.initramfs import AGENT, INIT, SERVICES, initramfs
from etude.envserver.images.layers import Root
from etude.envserver.images.spec import Disk, File, ImageSpec, digest

_MKE2FS_LIMIT_S = 300.0
MANIFEST = "manifest.json"
FILES = ("vmlinuz", "initramfs.gz", "root.sqsh")
UPPER = "upper.ext4"
MAX_MANIFEST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """What a guest boots: files that never change."""

    folder: Path
    name: str
    address: str
    """Digest of the spec and of the agent in it."""
    files: dict[str, str]
    """SHA-256 of each file, by name."""
    has_services: bool = False
    """Whether something runs in it beside what an agent starts."""

    @property
    def kernel(self) -> Path:
        """The kernel, in the format that QEMU loads."""
        return self.folder / "vmlinuz"

    @property
    def initramfs(self) -> Path:
        """What the kernel runs first."""
        return self.folder / "initramfs.gz"

    @property
    def root(self) -> Path:
        """The root file system, read-only, shared by all guests."""
        return self.folder / "root.sqsh"

    @property
    def upper(self) -> Path | None:
        """An empty file system for what the guest writes, where the spec wants a disk."""
        return self.folder / UPPER if UPPER in self.files else None


def address_of(spec: ImageSpec, agent: Path) -> str:
    """The address of the image of a spec with this agent in it."""
    made_of = [spec.to_json(), hashlib.sha256(agent.read_bytes()).hexdigest(), INIT]
    return digest("image", *made_of, kernel.MODULES)


def build(
    spec: ImageSpec, *, agent: Path, cache: Cache, say: Callable[[str], None] = lambda _: None
) -> Image:
    """The image of a spec, made if it is not in the cache.

    Args:
        spec: what it is made of.
        agent: the static program that is process 1 of the guest.
        cache: where parts and image are kept.
        say: is told what begins, one line each.

    Raises:
        UserError: a part cannot be made; the message says which and why.
    """
    address = address_of(spec, agent)
    found = cache.find("images", address)
    if found is None:
        fill = functools.partial(_fill, spec, agent, cache, say)
        found = cache.entry("images", address, fill)
    return read(found)


def read(folder: Path) -> Image:
    """The image in a folder of the cache.

    Raises:
        CorruptError: its manifest is damaged.
    """
    path = folder / MANIFEST
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(MAX_MANIFEST_BYTES))
        name, files = found["name"], {str(k): str(v) for k, v in found["files"].items()}
        has_services = bool(found.get("spec", {}).get("services"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as cause:
        raise CorruptError(f"{path}: {cause}; remove the folder and build again") from cause
    return Image(
        folder=folder,
        name=str(name),
        address=folder.name,
        files=files,
        has_services=has_services,
    )


def images(cache: Cache, kind: str = "images") -> list[Image]:
    """Every image of a kind in the cache, oldest first; one that is removed meanwhile is none.

    Raises:
        CorruptError: a manifest is damaged.
    """
    found = []
    for folder in cache.entries(kind):
        try:
            found.append(read(folder))
        except CorruptError:
            if folder.is_dir():
                raise
    return found


def newest(name: str, cache: Cache) -> Image | None:
    """The newest image of this name or address."""
    fitting = [each for each in images(cache) if name in {each.name, each.address}]
    return fitting[-1] if fitting else None


def _fill(
    spec: ImageSpec, agent: Path, cache: Cache, say: Callable[[str], None], folder: Path
) -> None:
    _add_kernel(spec.kernel, cache, say, folder)
    root = _root(spec, agent, cache, say)
    say("root: pack …")
    root.pack(folder / "root.sqsh")
    if spec.disk is not None:
        _make_disk(spec.disk, folder / UPPER)
    names = (*FILES, UPPER) if spec.disk is not None else FILES
    for name in names:
        # The machines run as another user than the one that built.
        (folder / name).chmod(0o644)
    manifest = {"name": spec.name, "files": {name: _sha256(folder / name) for name in names}}
    text = json.dumps({**manifest, "spec": spec.to_json()}, indent=1) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def _add_kernel(package: str, cache: Cache, say: Callable[[str], None], folder: Path) -> None:
    address = digest("kernel", package, kernel.MODULES)
    if cache.find("kernels", address) is None:
        say(f"kernel: download {package} …")
    found = cache.entry("kernels", address, functools.partial(kernel.fetch, package))
    shutil.copyfile(found / "vmlinuz", folder / "vmlinuz")
    busybox = Path(programs.find("busybox")).read_bytes()
    packed = initramfs(busybox=busybox, modules=found / "modules")
    (folder / "initramfs.gz").write_bytes(packed)


def _root(spec: ImageSpec, agent: Path, cache: Cache, say: Callable[[str], None]) -> Root:
    root = bases.root(spec.base, cache, say)
    with cache.scratch() as scratch:
        root = root.with_files(
            [_written(file, scratch / str(number)) for number, file in enumerate(_files(spec))]
        )
    for number, step in enumerate(spec.setup, start=1):
        if not root.is_kept(step):
            first = step.run.strip().partition("\n")[0][:60]
            say(f"setup {number}/{len(spec.setup)}: {first} …")
        root = root.with_step(step)
    return root.with_files([PlacedFile(source=str(agent.resolve()), path=AGENT, mode=0o755)])


def _files(spec: ImageSpec) -> list[File]:
    """The spec's files, and the one that begins its services."""
    if not spec.services:
        return list(spec.files)
    # A shell each: what one sets or changes is nothing to the next.
    scripts = [f"/bin/sh -e -c {shlex.quote(service.start)}\n" for service in spec.services]
    return [*spec.files, File(path=SERVICES, text="".join(scripts), mode="0700")]


def _written(file: File, source: Path) -> PlacedFile:
    source.write_bytes(file.text.encode())
    return PlacedFile(source=str(source), path=file.path, mode=int(file.mode, 8))


def _make_disk(disk: Disk, path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(disk.size_mib << 20)
    # A clone's disk is thrown away with it, so a journal would only cost writes.
    words = ("mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-m", "0", str(path))
    programs.run(words, what="disk", cwd=path.parent, timeout_s=_MKE2FS_LIMIT_S)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
