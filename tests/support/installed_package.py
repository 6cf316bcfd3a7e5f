"""A package that registers extensions, installed for one test."""

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest


def install_package(
    folder: Path,
    patch: pytest.MonkeyPatch,
    *,
    name: str,
    source: str,
    entries: Mapping[str, Mapping[str, str]],
) -> None:
    """Put a module and its metadata into a folder of sys.path, as pip would.

    Args:
        folder: gets both.
        patch: takes them off sys.path after the test.
        name: of the package and of its module.
        source: of the module.
        entries: `module:object` by name, by group.
    """
    (folder / f"{name}.py").write_text(source)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines: list[str] = []
    for group, objects in entries.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in objects.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    patch.syspath_prepend(str(folder))
    patch.delitem(sys.modules, name, raising=False)
