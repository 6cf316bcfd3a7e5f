"""The shape of the repository: namespace roots, file sizes, docstrings, light imports."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE_ROOTS = [
    "operator",
    "services/common",
    "services/agent",
    "services/trainer",
    "services/inference",
    "services/envserver",
    "services/rewards",
    "services/gateway",
    "services/feedback",
    "kernels",
    "cli",
    "examples/demo",
    "protos",
]
MAX_LINES = 400
HEAVY = ("torch", "vllm", "ray", "triton", "transformers")


def sources() -> list[Path]:
    """Our Python files, without generated stubs."""
    folders = [ROOT / r for r in SOURCE_ROOTS] + [ROOT / n for n in ("tests", "bench", "hack")]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    return sorted(p for p in files if not p.stem.endswith(("_pb2", "_pb2_grpc")))


def test_no_source_root_is_a_package() -> None:
    # A package named `operator` at the root would hide the standard library's.
    shadows = [r for r in SOURCE_ROOTS if (ROOT / r / "__init__.py").exists()]
    assert shadows == []


def test_etude_is_a_namespace_in_every_root() -> None:
    assert [r for r in SOURCE_ROOTS if (ROOT / r / "etude" / "__init__.py").exists()] == []


def test_every_root_is_in_the_wheel_and_in_the_type_check() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    wheel, mypy = tool["hatch"]["build"]["targets"]["wheel"], tool["mypy"]
    assert set(wheel["packages"]) == {f"{r}/etude" for r in SOURCE_ROOTS}
    assert set(wheel["dev-mode-dirs"]) == set(SOURCE_ROOTS)
    assert set(mypy["mypy_path"].split(":")) - {"hack/testbed", "bench"} == set(SOURCE_ROOTS)
    checked = {r for r in SOURCE_ROOTS if {r, r.partition("/")[0]} & set(mypy["files"])}
    assert checked == set(SOURCE_ROOTS) - {"protos"}, "generated stubs alone are not checked"
    assert {"tests", "bench", "hack"} <= set(mypy["files"])


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    long = {
        str(p.relative_to(ROOT)): n
        for p in sources()
        if (n := len(p.read_text().splitlines())) > MAX_LINES
    }
    assert long == {}


def test_every_file_opens_by_saying_what_it_is_for() -> None:
    silent = [
        str(p.relative_to(ROOT))
        for p in sources()
        if ast.get_docstring(ast.parse(p.read_text())) is None
    ]
    assert silent == []


@pytest.mark.parametrize(
    "part",
    ["operator", "trainer", "inference", "envserver", "rewards", "gateway", "feedback", "cli"],
)
def test_a_main_answers_before_anything_heavy_is_imported(part: str) -> None:
    code = f"import sys, etude.{part}.main; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_nothing_reads_files_outside_the_repository_by_name() -> None:
    # Words that would tie the project to the place where it was written.
    banned = ("../" + "shared", "/work" + "/main", "/work" + "/.library")
    texts = [*sources(), *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "Makefile"]
    guilty = [str(p) for p in texts if any(word in p.read_text() for word in banned)]
    assert guilty == []
