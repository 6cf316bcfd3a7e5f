"""The warmed-up policy of the real-time demo: trained once, kept by the content it follows from."""

import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from etude.common.errors import Problem, UserError
from etude.demo.realtime import inputs

EXAMPLES = Path(__file__).parents[4] / "realtime"
"""Manifests for people, which the demo runs."""
_INPUTS = Path("inputs") / "etude" / "realtime"
"""Folder of s3://etude/realtime/… inside a local run folder."""
_KEY_CHARS = 16


class WarmPolicy(NamedTuple):
    """What the demo starts from."""

    model: Path
    """Model folder with weights."""
    tasks: Path
    """Task folders of users."""
    held_out: Path
    """Task folders of the gate."""


def find_manifest(name: str) -> Path:
    """Find a manifest of the example.

    Raises:
        UserError: this is no clone of the repository.
    """
    path = EXAMPLES / name
    if not path.is_file():
        fix = "run from a clone of the repository"
        raise UserError(Problem("NotFound", "the example is not installed", str(path), fix))
    return path


def name_content(seed: int) -> str:
    """Name what a warm-up follows from: the generator's source, the manifest, seed and Python."""
    sources = sorted(Path(inputs.__file__).parents[1].glob("*.py"))
    files = [*sources, Path(inputs.__file__), find_manifest("warm-up.yaml")]
    parts = [b"%d" % seed, platform.python_version().encode(), *(f.read_bytes() for f in files)]
    return blake3(b"\0".join(blake3(part).digest() for part in parts)).hexdigest()[:_KEY_CHARS]


def prepare_policy(root: Path, seed: int) -> WarmPolicy:
    """Make the policy and the tasks of a seed, or find those of an earlier call.

    Args:
        root: folder of all warm-ups.
        seed: of everything.

    Raises:
        UserError: the generator or the run failed.
    """
    folder = root / f"warm-up-{name_content(seed)}"
    made = folder / _INPUTS
    if not (made / "facts.json").is_file():
        _run(["-m", inputs.__name__, "--out", str(made), "--seed", str(seed)], folder)
    model = folder / "policy"
    if not model.is_dir():
        etude = "from etude.cli.main import main; main()"
        manifest = str(find_manifest("warm-up.yaml"))
        _run(["-c", etude, "run", manifest, "--dir", str(folder), "--plain"], folder)
        # Renamed when complete: a folder that exists is whole.
        copy = folder / "policy.new"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(_newest_model(folder), copy)
        copy.rename(model)
    return WarmPolicy(model, made / "tasks" / "train", made / "tasks" / "held-out")


def _newest_model(folder: Path) -> Path:
    """The model of the run's last checkpoint.

    Raises:
        UserError: there is none.
    """
    found = sorted(folder.glob("checkpoints/*/model/config.json"))
    if not found:
        fix = "delete the folder, and start again"
        raise UserError(Problem("NotFound", "the run left no model", str(folder), fix))
    return found[-1].parent


def _run(words: list[str], folder: Path) -> None:
    """Run a Python program to its end.

    Raises:
        UserError: it failed.
    """
    done = subprocess.run([sys.executable, *words], check=False)
    if done.returncode:
        what = f"{words[1]} ended with {done.returncode}"
        raise UserError(Problem("Internal", what, str(folder), "see its output above"))
