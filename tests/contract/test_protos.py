"""The committed stubs are what the proto files say."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROTOS = ROOT / "protos" / "etude" / "v1"


def test_the_committed_stubs_are_regenerated_byte_for_byte(tmp_path: Path) -> None:
    files = sorted(str(p.relative_to(ROOT / "protos")) for p in PROTOS.glob("*.proto"))
    outputs = [
        f"--{kind}={tmp_path}"
        for kind in ("python_out", "pyi_out", "grpc_python_out", "mypy_grpc_out")
    ]
    plugin = f"--plugin=protoc-gen-mypy_grpc={Path(sys.executable).parent / 'protoc-gen-mypy_grpc'}"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Iprotos", plugin, *outputs, *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    made = {p.name: p.read_bytes() for p in (tmp_path / "etude" / "v1").iterdir()}
    kept = {p.name: p.read_bytes() for p in PROTOS.iterdir() if "_pb2" in p.name}
    assert sorted(made) == sorted(kept)
    assert [name for name in made if made[name] != kept[name]] == []
