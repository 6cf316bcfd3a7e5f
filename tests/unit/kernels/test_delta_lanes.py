"""Triton bodies without a GPU: the same laws under the interpreter, and code for real ones.

Each lane has its own process: Triton decides when a body is defined whether it is interpreted.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from etude.kernels import delta_triton, digest_triton, dispatch

HERE = Path(__file__).parent
LAWS = (
    "test_delta_watch.py",
    "test_delta_laws.py",
    "test_delta_cast.py",
    "test_delta_digest.py",
    "test_delta_refusals.py",
)

if dispatch.FORCED or dispatch.INTERPRETED:
    pytest.skip("already in another lane", allow_module_level=True)


def test_the_laws_hold_for_triton_bodies_under_the_interpreter() -> None:
    words = (sys.executable, "-m", "pytest", "-q", f"--confcutdir={HERE}", "-p", "no:cacheprovider")
    env = os.environ | {"TRITON_INTERPRET": "1", "ETUDE_KERNELS": "triton"}
    files = [str(HERE / name) for name in LAWS]
    done = subprocess.run([*words, *files], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    assert "skipped" not in done.stdout.splitlines()[-1], done.stdout[-2000:]


TABLE = {"chunk_tile": "*i32", "first_chunk": "*i64", "base": "*i64", "elements": "*i32"}
CHUNKED = {"CHUNK": 4096, "ALIGN": 16}
MARK = {"old": "*u16", "fresh": "*u16", "mask": "*i32", "chunk_counts": "*i32", **TABLE}
COMPACT = {"mask": "*i32", "chunk_ends": "*i64", "overflow": "*u8", "index": "*i32", **TABLE}
VISIT = {
    "partial": "*i64",
    "counts": "*i32",
    "starts": "*i64",
    "index": "*i32",
    "overflow": "*u8",
    "elements": "*i32",
    "base": "*i64",
    "width": "*i32",
    "pitch": "*i64",
    "lane": "*i64",
    "lane_pitch": "*i64",
    "limit": "i64",
}
VISITING = {"KEEP": True, "ENTRIES": 1024}
SCAN = {"partial": "*i64", "n": "i64", "first_lane": "i64"}
BODIES: dict[str, tuple[str, dict[str, str], dict[str, Any], int]] = {
    "mark": ("_mark", MARK | {"new": "*u16"}, CHUNKED | {"CAST": False}, 8),
    "cast": ("_mark", MARK | {"new": "*u32"}, CHUNKED | {"CAST": True}, 8),
    "compact": ("_compact", COMPACT | {"new": "*u16", "value": "*u16"}, CHUNKED, 8),
    "predict": (
        "_visit",
        VISIT | {"raw": "*u16", "old": "*u16", "value": "*u16"},
        VISITING | {"LANES": 1, "WRITE": False, "DIGEST": True},
        4,
    ),
    "overwrite": (
        "_visit",
        VISIT | {"raw": "*u32", "old": "*u32", "value": "*u32"},
        VISITING | {"LANES": 2, "WRITE": True, "DIGEST": False},
        4,
    ),
    "digest": (
        "_scan",
        SCAN | {"raw": "*u16"},
        {"LANES": 1, "BLOCK": 1024, "BLOCKS": 32},
        4,
    ),
}
WIDE = ("mark", "cast", "digest")
"""Bodies that read whole tensors."""


def compiled(
    name: str, types: Mapping[str, str], values: Mapping[str, Any], *, warps: int, capability: int
) -> bytes:
    """The machine code of a body for a GPU that need not be here."""
    body = getattr(delta_triton, name, None) or getattr(digest_triton, name)
    signature = {arg: types.get(arg, "constexpr") for arg in body.arg_names}
    aligned = [i for i, arg in enumerate(body.arg_names) if arg in types]
    source = ASTSource(
        fn=body,
        signature=signature,
        constexprs=dict(values),
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    kernel = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps}
    )
    code: bytes = kernel.asm["cubin"]
    return code


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("body", BODIES)
def test_a_body_compiles_without_spills_and_reads_wide(
    body: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    name, types, values, warps = BODIES[body]
    cubin = tmp_path / "body.cubin"
    cubin.write_bytes(compiled(name, types, values, warps=warps, capability=capability))
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    usage = subprocess.run(
        [tools / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=True
    )
    assert re.findall(r"STACK:(\d+)", usage.stdout) == ["0"], usage.stdout
    code = subprocess.run(
        [tools / "nvdisasm", cubin], capture_output=True, text=True, check=True
    ).stdout
    assert not re.search(r"\b(?:STL|LDL)\b", code), "registers spill"
    if body in WIDE:
        assert "LDG.E.128" in code
        assert not re.search(r"LDG\.E\.U(?:8|16)", code), "elements are loaded one by one"
