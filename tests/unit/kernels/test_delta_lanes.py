"""Triton bodies without a GPU: the same laws under the interpreter, and code for real ones.

Each lane has its own process: Triton decides when a body is defined whether it is interpreted.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from etude.kernels import delta_scan_triton, delta_triton, digest_triton, dispatch

HERE = Path(__file__).parent
LAWS = (
    "test_delta_watch.py",
    "test_delta_laws.py",
    "test_delta_cast.py",
    "test_delta_digest.py",
    "test_delta_axis.py",
    "test_delta_refusals.py",
)

if dispatch.FORCED or dispatch.INTERPRETED:
    pytest.skip("already in another lane", allow_module_level=True)


@pytest.mark.long
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


class Body(NamedTuple):
    """One way to compile a body."""

    module: ModuleType
    name: str
    types: dict[str, str]
    values: dict[str, Any]
    warps: int


def visiting(word: str, **values: Any) -> Body:
    words = {"raw": word, "old": word, "fresh": word, "value": word}
    fixed = {"AXIS": 0, "WRITE": False, "DIGEST": False} | values
    return Body(delta_triton, "_visit", VISIT | words, VISITING | fixed, 4)


MARKED = MARK | {"new": "*u16"}
CAST = MARK | {"new": "*u32"}
COMPACTED = COMPACT | {"new": "*u16", "value": "*u16"}
DIGESTED = SCAN | {"raw": "*u16"}
BODIES = {
    "mark": Body(delta_scan_triton, "_mark", MARKED, CHUNKED | {"CAST": False}, 8),
    "mark anywhere": Body(
        delta_scan_triton, "_mark", MARKED, {"CHUNK": 4096, "ALIGN": 1, "CAST": False}, 8
    ),
    "cast": Body(delta_scan_triton, "_mark", CAST, CHUNKED | {"CAST": True}, 8),
    "compact": Body(delta_scan_triton, "_compact", COMPACTED, CHUNKED, 8),
    "predict": visiting("*u16", LANES=1, BITS=16, DIGEST=True),
    "resolve": visiting("*u16", LANES=1, BITS=16, DIGEST=True, AXIS=2),
    "overwrite": visiting("*u32", LANES=2, BITS=32, WRITE=True),
    "digest": Body(digest_triton, "_scan", DIGESTED, {"LANES": 1, "BLOCK": 1024, "BLOCKS": 32}, 4),
}
QUICK = {("mark", 100), ("compact", 90), ("resolve", 90), ("digest", 100)}
"""One compilation of each body; `make test-long` has the other forms and GPUs."""
WIDE = ("mark", "cast", "digest")
"""Bodies that read whole tensors."""


def compiled(body: Body, *, capability: int) -> bytes:
    """The machine code of a body for a GPU that need not be here."""
    function = getattr(body.module, body.name)
    names = function.arg_names
    source = ASTSource(
        fn=function,
        signature={name: body.types.get(name, "constexpr") for name in names},
        constexprs=dict(body.values),
        attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in body.types},
    )
    target = GPUTarget("cuda", capability, 32)
    kernel = triton.compile(source, target=target, options={"num_warps": body.warps})
    code: bytes = kernel.asm["cubin"]
    return code


@pytest.mark.parametrize(
    ("body", "capability"),
    [
        pytest.param(
            body, capability, marks=() if (body, capability) in QUICK else pytest.mark.long
        )
        for body in BODIES
        for capability in (90, 100)
    ],
)
def test_a_body_compiles_without_spills_and_reads_wide(
    body: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    cubin = tmp_path / "body.cubin"
    cubin.write_bytes(compiled(BODIES[body], capability=capability))
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
