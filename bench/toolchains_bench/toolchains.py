"""The toolchains, and the images of their repositories, built by buildah.

A repository's dependencies come from their registry by its own client on this machine; in the build
only Debian's packages are installed.
"""

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from etude.envserver.images.base_filesystem import make_base
from etude.envserver.images.build_cache import BuildCache
from etude.envserver.images.dockerfile_build import build_dockerfile
from etude.envserver.images.pull.registry_access import NO_ACCESS
from etude.envserver.images.spec import DebianBase, ImageBase

PLACE = Path(__file__).parent
_BASE = ImageBase(debian=DebianBase(packages=("python3", "git", "ca-certificates")))
_FETCH_LIMIT_S = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """One toolchain with a repository."""

    source: str
    """File with the bug."""
    build: str
    """Fills the folder that the repository ignores."""
    test: str
    ignored: str
    fetch: Sequence[str] = ()
    """Command in the repository that fetches its dependencies, on this machine."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of that command; {context} is the folder of the build."""
    wrong: str = "a - b"
    right: str = "a + b"


TOOLCHAINS: Mapping[str, Toolchain] = {
    "java": Toolchain(
        source="Sums.java",
        build="mkdir -p build && javac -d build *.java",
        test="javac -d build *.java && java -cp build SumsTest",
        ignored="build",
    ),
    "go": Toolchain(
        source="add.go",
        build="go build ./...",
        test="go test ./...",
        ignored=".cache",
        fetch=("go", "mod", "download", "github.com/google/uuid"),
        environment={"GOMODCACHE": "{context}/dependencies", "GOFLAGS": "-modcacherw"},
    ),
    "node": Toolchain(
        source="add.js",
        build="npm install --offline --cache /opt/dependencies --no-audit --no-fund",
        test="npm test",
        ignored="node_modules",
        fetch=("npm", "install", "--silent", "--ignore-scripts"),
        environment={
            "npm_config_cache": "{context}/dependencies",
            "npm_config_omit_lockfile_registry_resolved": "false",
        },
    ),
    "rust": Toolchain(
        source="src/lib.rs",
        build="cargo build --offline",
        test="cargo test --offline",
        ignored="target",
        fetch=("cargo", "vendor", "--quiet", "../dependencies"),
    ),
}


def build_image(name: str, work: Path, base: BuildCache, say: Callable[[str], None]) -> str:
    """Build the image of a toolchain into `work/layouts`; returns its reference."""
    toolchain, context = TOOLCHAINS[name], work / "context"
    root = make_base(_BASE, base, say)
    shutil.copytree(
        PLACE / name, context / "app", ignore=shutil.ignore_patterns("Dockerfile", "__pycache__")
    )
    shutil.copyfile(PLACE / name / "Dockerfile", context / "Dockerfile")
    (context / "dependencies").mkdir()
    _fetch(toolchain, context)
    _copy_root(base.root / root.layers[0], context / "root")
    built = build_dockerfile(
        context,
        (work / "layouts").as_uri(),
        storage=work / "buildah",
        registries=NO_ACCESS,
        say=say,
    )
    shutil.rmtree(context)
    shutil.rmtree(work / "buildah")
    return str(built.image)


def _fetch(toolchain: Toolchain, context: Path) -> None:
    if toolchain.fetch:
        variables = {
            name: value.format(context=context) for name, value in toolchain.environment.items()
        }
        subprocess.run(
            toolchain.fetch,
            cwd=context / "app",
            env={**os.environ, **variables},
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=_FETCH_LIMIT_S,
        )
    # Made in the image, by its own version of the client.
    shutil.rmtree(context / "app" / toolchain.ignored, ignore_errors=True)
    (context / "app" / "Cargo.lock").unlink(missing_ok=True)


def _copy_root(tree: Path, target: Path) -> None:
    """Copy a root without devices: a copy of /dev/zero has no end."""

    def left_out(folder: str, names: list[str]) -> list[str]:
        if Path(folder) == tree:
            return ["workspace"]  # a link to the image's working folder
        return names if Path(folder) in {tree / "dev", tree / "proc", tree / "sys"} else []

    shutil.copytree(tree, target, symlinks=True, ignore=left_out)
