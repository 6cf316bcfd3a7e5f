"""Images made on the spot: one base layer, and a small layer each."""

import random
import shutil
from pathlib import Path

from tests.support import oci_layouts
from tests.support.oci_layouts import Member, file, folder, link

PROGRAMS = ("sh", "cat", "grep", "ls", "id", "echo", "mkdir", "readlink")
BASE_FILES, BASE_BYTES = 400, 20 << 10
BUILT_FILES, BUILT_BYTES = 50, 20 << 10
SOURCES = 20


def write_images(layout: Path, count: int) -> list[str]:
    """Write images into one layout; returns their references."""
    base = oci_layouts.add_layer(layout, _base())
    found = []
    for number in range(count):
        repository = oci_layouts.add_layer(layout, _repository(number))
        digest = oci_layouts.write_image(layout, [base, repository], {"WorkingDir": "/app"})
        found.append(f"{layout.as_uri()}@{digest}")
    return found


def _base() -> list[Member]:
    """A shell, and what stands for a toolchain: 8 MB that do not compress."""
    noise = random.Random(0)  # noqa: S311 - the same bytes each time
    busybox = Path(shutil.which("busybox") or "busybox").read_bytes()
    return [
        *(folder(name) for name in ("bin", "etc", "opt", "opt/tools")),
        file("bin/busybox", busybox, mode=0o755),
        *(link(f"bin/{name}", "busybox") for name in PROGRAMS),
        file("bin/bash", b'#!/bin/sh\nexec /bin/sh "$@"\n', mode=0o755),
        *(file(f"opt/tools/{n}", noise.randbytes(BASE_BYTES)) for n in range(BASE_FILES)),
    ]


def _repository(number: int) -> list[Member]:
    """A repository in the working folder, and 1 MB of what was built of it."""
    noise = random.Random(number + 1)  # noqa: S311 - the same bytes each time
    return [
        *(folder(name) for name in ("app", "opt/built")),
        file("etc/word", f"image-{number}\n".encode()),
        *(file(f"app/module_{n}.py", f"VALUE = {n}\n".encode() * 40) for n in range(SOURCES)),
        *(file(f"opt/built/{n}", noise.randbytes(BUILT_BYTES)) for n in range(BUILT_FILES)),
    ]
