"""Programs of the names that the driver looks for."""

import sys
from collections.abc import Callable
from pathlib import Path

from etude.envserver.drivers.vm.firecracker.driver import FirecrackerDriver
from etude.envserver.drivers.vm.firecracker.jail import FirecrackerPrograms

ROOT = Path(__file__).parents[4]
Make = Callable[[Path], FirecrackerDriver]
"""Makes a driver over the fakes that works in this folder."""


def install(folder: Path) -> FirecrackerPrograms:
    """Write both fakes into a folder, where every user may run them."""
    folder.mkdir(exist_ok=True)
    for name, module in {"firecracker": "monitor", "jailer": "jailer"}.items():
        path = folder / name
        path.write_text(
            f"#!/bin/sh\nPATH=/usr/bin:/bin PYTHONPATH={ROOT} PYTHONDONTWRITEBYTECODE=1"
            f' exec {sys.executable} -m tests.support.vm.firecracker.{module} "$@"\n'
        )
        path.chmod(0o755)
    return FirecrackerPrograms(firecracker=folder / "firecracker", jailer=folder / "jailer")
