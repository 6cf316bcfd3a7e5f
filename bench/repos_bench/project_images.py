"""Images of projects: Debian with the toolchain and what the tests need, built by buildah.

The repository is not in them: each mined task brings its files, without the tests that it hides.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.common.run_folder.state import images_folder
from etude.envserver.images.base_filesystem import make_base
from etude.envserver.images.build_cache import BuildCache
from etude.envserver.images.dockerfile_build import build_dockerfile
from etude.envserver.images.pull.registry_access import NO_ACCESS
from etude.envserver.images.spec import DebianBase, ImageBase
from repos_bench.projects import Project, Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """Toolchain of a registry's projects."""

    packages: Sequence[str]
    """Debian's, on top of python3, which reads the log of each suite."""
    places: Mapping[str, str]
    """Folders that tests need: name in the repository to place in the image."""


TOOLCHAINS = {
    Registry.PYPI: Toolchain(packages=(), places={".deps": "/opt/deps"}),
    # Node and cargo look for these in the folders above the working folder.
    Registry.NPM: Toolchain(packages=("nodejs",), places={"node_modules": "/node_modules"}),
    Registry.CRATES: Toolchain(
        packages=("cargo",), places={"vendor": "/vendor", ".cargo": "/.cargo"}
    ),
    Registry.GO: Toolchain(packages=("golang-go",), places={}),
}


_INSTALL = (
    "RUN apt-get -qq update && apt-get -qq install -y --no-install-recommends {packages} >/dev/null"
    " && rm -rf /var/lib/apt/lists/* /var/cache/apt/*"
)


def image_command(project: Project) -> str:
    """Command of the suite in the image; empty for that of the language."""
    match project.registry:
        case Registry.PYPI:
            return project.test_command.replace(".deps", "/opt/deps")
        case _:
            return project.test_command.replace("node_modules", "/node_modules")


def build_project_image(
    project: Project, repository: Path, cache: Path, say: Callable[[str], None]
) -> str:
    """Build a project's image as root, unless its layers are cached; returns its reference.

    Raises:
        UserError: Debian's archive or buildah failed.
    """
    toolchain = TOOLCHAINS[project.registry]
    context = cache / "contexts" / repository.name
    shutil.rmtree(context, ignore_errors=True)
    context.mkdir(parents=True)
    os.link(_pack_base(cache, say), context / "base.tar")
    lines = ["FROM scratch", "ADD base.tar /"]
    if toolchain.packages:
        lines.append(_INSTALL.format(packages=" ".join(toolchain.packages)))
    for name, place in toolchain.places.items():
        shutil.copytree(repository / name, context / name.lstrip("."), symlinks=True)
        lines.append(f"COPY {name.lstrip('.')} {place}")
    lines += ["ENV PATH=/usr/local/bin:/usr/bin:/bin", "WORKDIR /workspace"]
    (context / "Dockerfile").write_text("\n".join(lines) + "\n")
    built = build_dockerfile(
        context,
        (cache / "layouts").as_uri(),
        storage=images_folder() / "buildah",
        registries=NO_ACCESS,
        say=say,
    )
    shutil.rmtree(context)
    return str(built.image)


def _pack_base(cache: Path, say: Callable[[str], None]) -> Path:
    """Write an archive of Debian with python3; done once."""
    images = BuildCache(images_folder())
    root = make_base(ImageBase(debian=DebianBase(packages=("python3",))), images, say)
    archive = cache / "bases" / f"{root.address}.tar"
    if not archive.exists():
        archive.parent.mkdir(parents=True, exist_ok=True)
        partial = archive.with_suffix(".partial")
        tree = images.root / root.layers[0]
        # Nodes bring devices, processes and kernel interfaces of their own.
        left_out = [f"--exclude=./{name}/*" for name in ("dev", "proc", "sys")]
        words = ["tar", "--sort=name", "--mtime=@0", "--numeric-owner", *left_out]
        subprocess.run([*words, "-cf", str(partial), "-C", str(tree), "."], check=True)
        partial.rename(archive)
    return archive


def build_machine(folder: Path) -> str:
    """Build the image that gives kernel and agent; returns its name."""
    spec = folder / "machine.yaml"
    spec.write_text("name: bench-machine\nbase: {busybox: {}}\n")
    words = [sys.executable, "-m", "etude.envserver.images.command", "build", str(spec)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return "bench-machine"
