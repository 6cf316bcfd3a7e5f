"""The event client in TypeScript passes the cases that the Python client passes."""

import json
import re
import shutil
import subprocess
from pathlib import Path

from tests.support import needs

FOLDER = Path(__file__).parents[2] / "clients" / "typescript"


def test_the_package_passes_its_tests() -> None:
    node = shutil.which("node")
    if node is None:
        needs.skip("node is not installed", "node")
    done = subprocess.run(
        [node, "--test", "test/"], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4_000:]


def test_the_package_has_no_dependency_and_declares_each_export() -> None:
    package = json.loads((FOLDER / "package.json").read_text())
    assert not {"dependencies", "devDependencies", "peerDependencies"} & package.keys()
    assert all((FOLDER / name).is_file() for name in package["files"])
    exported = r"^export (?:async )?(?:class|function) (\w+)"
    source = (FOLDER / "index.js").read_text() + (FOLDER / "spool.js").read_text()
    declared = (FOLDER / "index.d.ts").read_text()
    assert set(re.findall(exported, source, re.MULTILINE)) == set(
        re.findall(exported, declared, re.MULTILINE)
    )
