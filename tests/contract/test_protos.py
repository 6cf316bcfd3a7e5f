"""The committed stubs are what the proto files say."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROTOS = ROOT / "protos"


def stubs(folder: Path) -> dict[str, bytes]:
    found = folder.glob("etude/*/*_pb2*.py*")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def test_the_committed_stubs_are_regenerated_byte_for_byte(tmp_path: Path) -> None:
    files = sorted(str(p.relative_to(PROTOS)) for p in PROTOS.glob("etude/*/*.proto"))
    outputs = [
        f"--{kind}={tmp_path}"
        for kind in ("python_out", "pyi_out", "grpc_python_out", "mypy_grpc_out")
    ]
    plugin = f"--plugin=protoc-gen-mypy_grpc={Path(sys.executable).parent / 'protoc-gen-mypy_grpc'}"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Iprotos", plugin, *outputs, *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    made, kept = stubs(tmp_path), stubs(PROTOS)
    assert sorted(made) == sorted(kept)
    assert [name for name in made if made[name] != kept[name]] == []
