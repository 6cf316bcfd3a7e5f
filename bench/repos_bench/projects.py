"""The projects: name, version, and what their tests need; registries' clients check the hashes."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

PINS = Path(__file__).parent
_UV = shutil.which("uv") or str(PINS.parents[1] / ".tools" / "bin" / "uv")
"""As in the Makefile."""
_VENDORED = """\
[source.crates-io]
replace-with = "vendored-sources"
[source.vendored-sources]
directory = "vendor"
"""
_COMMIT = {
    **{f"GIT_{who}_NAME": "bench" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_EMAIL": "bench@example.com" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_DATE": "2026-01-01T00:00:00Z" for who in ("AUTHOR", "COMMITTER")},
}
_PYTEST = ("pytest", "_pytest", "py.py", "pluggy", "iniconfig", "packaging")
_GO_SUM = "h1:NIvaJDMOsjHA8n1jAhLSgzrAzy1Hgr+hNrb57e+94F0="


class Registry(StrEnum):
    """Registry that a project comes from."""

    PYPI = "PyPI"
    NPM = "npm"
    CRATES = "crates.io"
    GO = "Go"


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """One project of a registry."""

    name: str
    version: str
    registry: Registry
    program: str
    """Program without which its tests do not run."""
    test_command: str = ""
    """By language unless given."""
    modules: Sequence[str] = ()
    """Modules of Python that its tests import; never its own."""

    @property
    def slot(self) -> str:
        """Fields of the slot of the process driver: compilers take more than its default."""
        is_default = self.registry is Registry.PYPI
        return "" if is_default else "memoryMib=4096,processes=512,fileMib=512,temporaryMib=1024"

    @property
    def dependencies(self) -> Sequence[str]:
        """Folders that its tests need and git ignores."""
        match self.registry:
            case Registry.PYPI:
                return (".deps",)
            case Registry.NPM:
                return ("node_modules",)
            case Registry.CRATES:
                return ("vendor", ".cargo")
            case Registry.GO:
                return ()


def _pypi(
    name: str, version: str, *modules: str, source: str = "src:", options: str = ""
) -> Project:
    return Project(
        name=name,
        version=version,
        registry=Registry.PYPI,
        program="python3",
        test_command=(
            f"PYTHONPATH={source}.deps python3 -m pytest -rA --tb=short -p no:cacheprovider"
            f"{options} tests"
        ),
        modules=(*_PYTEST, *modules),
    )


_TRIO = ("trio", "attr", "attrs", "outcome", "sniffio", "sortedcontainers", "idna")
_HYPOTHESIS = (
    "hypothesis",
    "_hypothesis_globals.py",
    "_hypothesis_ftz_detector.py",
    "_hypothesis_pytestplugin.py",
    "sortedcontainers",
)
PROJECTS = (
    _pypi("itsdangerous", "2.2.0", "freezegun", "dateutil"),
    _pypi("click", "8.1.8"),
    Project(
        name="shell-quote",
        version="1.8.2",
        registry=Registry.NPM,
        program="node",
        test_command="node node_modules/tape/bin/tape 'test/**/*.js'",
    ),
    Project(name="itoa", version="1.0.9", registry=Registry.CRATES, program="/usr/bin/cargo"),
    Project(name="semver", version="1.0.18", registry=Registry.CRATES, program="/usr/bin/cargo"),
    Project(name="github.com/google/uuid", version="v1.6.0", registry=Registry.GO, program="go"),
    _pypi("jinja2", "3.1.6", "markupsafe", *_TRIO),
    _pypi("more_itertools", "10.7.0", source=""),
    _pypi(
        "attrs",
        "25.3.0",
        *_HYPOTHESIS,
        # Those read the metadata of an installed attrs; this one fails on this Python as it is.
        options=" --ignore=tests/test_packaging.py"
        " --deselect=tests/test_converters.py::TestPipe::test_wrapped_annotation",
    ),
)
"""Fast suites first."""


def _run(words: Sequence[str], folder: Path, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, **(env or {})},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout


def prepare_project(project: Project, cache: Path) -> Path:
    """Make the repository of a project, with one commit and its dependencies; done once.

    Raises:
        CalledProcessError: a registry's client failed, as it does for a wrong hash.
    """
    target = cache / "repositories" / project.name.rpartition("/")[2]
    if target.exists():
        return target
    partial = target.with_name(f".{target.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    match project.registry:
        case Registry.PYPI:
            _take_sdist(project, cache, partial)
        case Registry.NPM:
            _take_npm(project, cache, partial)
        case Registry.CRATES:
            _take_crate(project, cache, partial)
        case Registry.GO:
            _take_module(project, partial)
    _run(("git", "init", "-q"), partial)
    ignored = "".join(f"/{name}/\n" for name in project.dependencies)
    (partial / ".git" / "info" / "exclude").write_text(ignored)
    _run(("git", "add", "-A"), partial)
    _run(("git", "commit", "-q", "-m", f"{project.name} {project.version}"), partial, _COMMIT)
    partial.rename(target)
    return target


def _take_sdist(project: Project, cache: Path, target: Path) -> None:
    archive = cache / "pypi" / f"{project.name}-{project.version}.tar.gz"
    if not archive.exists():
        words = ("python3", "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:")
        where = ("--require-hashes", "-r", str(PINS / "python" / "sources.txt"), "-d")
        _run((*words, *where, str(archive.parent)), PINS)
    with tarfile.open(archive) as content:
        content.extractall(cache / "pypi", filter="data")
    (cache / "pypi" / f"{project.name}-{project.version}").rename(target)
    library = cache / "pypi" / "library"
    if not library.exists():
        install = (_UV, "pip", "install", "--quiet", "--require-hashes")
        library_of = (
            "--python",
            sys.executable,
            "-r",
            str(PINS / "python" / "tests.txt"),
            "--target",
        )
        _run((*install, *library_of, str(library)), PINS)
    # Plugins and versions are found by the metadata of distributions.
    metadata = [
        path.name for name in project.modules for path in library.glob(f"{name}-*.dist-info")
    ]
    for name in (*project.modules, *metadata):
        source, copied = library / name, target / ".deps" / name
        copied.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copied)
        else:
            shutil.copyfile(source, copied)


def _take_npm(project: Project, cache: Path, target: Path) -> None:
    folder = cache / "npm"
    if not folder.exists():
        partial = cache / ".npm"
        shutil.copytree(PINS / "npm", partial, dirs_exist_ok=True)
        _run(("npm", "ci", "--ignore-scripts", "--silent"), partial)
        partial.rename(folder)
    shutil.copytree(folder / "node_modules" / project.name, target)
    names = {project.name, ".bin", ".package-lock.json"}
    ignore = shutil.ignore_patterns(*names)
    shutil.copytree(folder / "node_modules", target / "node_modules", ignore=ignore)


def _take_crate(project: Project, cache: Path, target: Path) -> None:
    folder = cache / "crates"
    if not folder.exists():
        partial = cache / ".crates"
        shutil.copytree(PINS / "crates", partial, dirs_exist_ok=True)
        (partial / "empty.rs").touch()
        _run(("cargo", "vendor", "--quiet", "--locked", "vendor"), partial)
        partial.rename(folder)
    ignore = shutil.ignore_patterns("Cargo.lock", ".cargo-checksum.json")
    shutil.copytree(folder / "vendor" / project.name, target, ignore=ignore)
    shutil.copytree(folder / "vendor", target / "vendor")
    shutil.rmtree(target / "vendor" / project.name)
    (target / ".cargo").mkdir()
    (target / ".cargo" / "config.toml").write_text(_VENDORED)


def _take_module(project: Project, target: Path) -> None:
    name = f"{project.name}@{project.version}"
    found = json.loads(_run(("go", "mod", "download", "-json", name), PINS))
    if found["Sum"] != _GO_SUM:
        raise ValueError(f"{name} has the sum {found['Sum']}, not {_GO_SUM}")
    shutil.copytree(found["Dir"], target)
    for path in (target, *target.rglob("*")):
        path.chmod(path.stat().st_mode | 0o200)
