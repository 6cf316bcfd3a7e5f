"""The Containerfile builds every role, and leaves nothing out that a role imports."""

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Containerfile").read_text(encoding="utf-8")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
STAGE = re.compile(r"^FROM (\S+) AS (\S+)\n(.*?)(?=^FROM|\Z)", re.MULTILINE | re.DOTALL)
STAGES = {name: (base, body) for base, name, body in STAGE.findall(TEXT)}
TARGETS = [name for name, (_, body) in STAGES.items() if "USER" in body]
IMPORTED = """
import importlib, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(f"{name} is not in the image")

sys.meta_path.insert(0, Absent())
package = importlib.import_module("etude.operator")
for module in pkgutil.walk_packages(package.__path__, "etude.operator."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
for name in ("etude.cli.main", "etude.cli.buckets", "etude.common.blobs.factory"):
    importlib.import_module(name)
"""


def test_each_role_has_a_target_of_its_own_extra() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    for target in TARGETS:
        _, synced = STAGES[f"build-{target}"]
        used = re.findall(r"--extra (\S+)", synced)
        assert used[0] == target
        assert set(used) <= extras.keys()
    assert {
        "operator",
        "rewards",
        "gateway",
        "feedback",
        "envserver",
        "trainer",
        "inference",
        "cpu",
        "gpu",
    } <= {*TARGETS}


def test_ray_is_where_a_login_shell_looks_for_it() -> None:
    """Before 1.4 KubeRay asks for the head in one, whose PATH is not the image's."""
    for target in ("trainer", "cpu", "gpu"):
        assert "ln -s /opt/etude/bin/ray /usr/local/bin/ray" in STAGES[target][1], target


def test_no_target_runs_as_root() -> None:
    for target in TARGETS:
        _, body = STAGES[target]
        assert "USER 10001:10001" in body
        base, _ = STAGES[target]
        assert base in {"role", "accelerated"}


def test_each_role_starts_its_own_program() -> None:
    programs = PROJECT["project"]["scripts"].keys()
    for target in TARGETS:
        _, body = STAGES[target]
        for program in re.findall(r'CMD \["(.*)"\]', body):
            assert program in programs
            assert target.startswith(program.removeprefix("etude-"))


def test_the_operator_imports_nothing_that_its_image_leaves_out() -> None:
    left_out = re.findall(r"--no-install-package (\S+)", STAGES["build-operator"][1])
    modules = {
        module
        for module, packages in metadata.packages_distributions().items()
        if set(left_out) & {each.lower().replace("_", "-") for each in packages}
    }
    assert {"numba", "tokenizers"} <= modules
    words = (sys.executable, "-c", IMPORTED, *sorted(modules))
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


def test_what_goes_into_the_wheel_goes_into_the_build() -> None:
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", TEXT, re.MULTILINE)
    folders = [Path(each) for line in copied for each in line.split()]
    for path in (*wheel["packages"], *wheel["force-include"]):
        assert any(Path(path).is_relative_to(folder) for folder in folders), path
