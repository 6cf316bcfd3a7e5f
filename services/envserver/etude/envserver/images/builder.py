"""Builder of images: kernel, initramfs, root file system and manifest."""

import functools
import hashlib
import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

from etude.envserver.images import base_filesystem, built_image, guest_kernel, host_programs
from etude.envserver.images.build_cache import BuildCache
from etude.envserver.images.built_image import FILES, GUEST_VERSION, MANIFEST, BuiltImage
from etude.envserver.images.initramfs import AGENT, INIT, SERVICES, initramfs
from etude.envserver.images.layers import RootFilesystem
from etude.envserver.images.setup_step import PlacedFile
from etude.envserver.images.spec import ImageFile, ImageSpec, digest


def build(
    spec: ImageSpec,
    *,
    agent: Path,
    cache: BuildCache,
    say: Callable[[str], None] = lambda _: None,
) -> BuiltImage:
    """Build the image of a spec, unless it is cached.

    Args:
        spec: what it is made of.
        agent: the static program that is process 1 of the guest.
        cache: for parts and image.
        say: called with a line for each step.

    Raises:
        UserError: a part cannot be made; the message says which and why.
    """
    address = image_address(spec, agent)
    found = cache.find("images", address)
    if found is None:
        fill = functools.partial(fill_image, spec, agent, cache, say)
        found = cache.entry("images", address, fill)
    return built_image.read_image(found)


def image_address(spec: ImageSpec, agent: Path) -> str:
    """Address of the image of a spec with this agent."""
    made_of = [spec.to_json(), hashlib.sha256(agent.read_bytes()).hexdigest(), INIT, GUEST_VERSION]
    return digest("image", *made_of, guest_kernel.MODULES)


def fill_image(
    spec: ImageSpec, agent: Path, cache: BuildCache, say: Callable[[str], None], folder: Path
) -> None:
    """Write an image into an empty folder.

    Raises:
        UserError: a part cannot be made; the message says which and why.
    """
    _add_kernel(spec.kernel, cache, say, folder)
    root = _root(spec, agent, cache, say)
    say("root: pack …")
    root.pack(folder / "root.sqsh")
    for name in FILES:
        # VMs run as another user than the one that built.
        (folder / name).chmod(0o644)
    manifest = {
        "name": spec.name,
        "files": {name: _sha256(folder / name) for name in FILES},
        "guest": GUEST_VERSION,
        "spec": spec.to_json(),
    }
    text = json.dumps(manifest, indent=1) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def _add_kernel(package: str, cache: BuildCache, say: Callable[[str], None], folder: Path) -> None:
    address = digest("kernel", package, guest_kernel.MODULES)
    if cache.find("kernels", address) is None:
        say(f"kernel: download {package} …")
    found = cache.entry("kernels", address, functools.partial(guest_kernel.fetch_kernel, package))
    shutil.copyfile(found / "vmlinuz", folder / "vmlinuz")
    busybox = Path(host_programs.find_program("busybox")).read_bytes()
    packed = initramfs(busybox=busybox, modules=found / "modules")
    (folder / "initramfs.gz").write_bytes(packed)


def _root(
    spec: ImageSpec, agent: Path, cache: BuildCache, say: Callable[[str], None]
) -> RootFilesystem:
    root = base_filesystem.make_base(spec.base, cache, say)
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


def _files(spec: ImageSpec) -> list[ImageFile]:
    """The spec's files, and the script that starts its services."""
    if not spec.services:
        return list(spec.files)
    # A shell each: settings of one do not reach the next.
    scripts = [f"/bin/sh -e -c {shlex.quote(service.start)}\n" for service in spec.services]
    return [*spec.files, ImageFile(path=SERVICES, text="".join(scripts), mode="0700")]


def _written(file: ImageFile, source: Path) -> PlacedFile:
    source.write_bytes(file.text.encode())
    return PlacedFile(source=str(source), path=file.path, mode=int(file.mode, 8))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
