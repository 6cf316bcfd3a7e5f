"""The warmed-up policy of the real-time demo: trained once, kept by the content it follows from."""

import platform
import shutil
import subprocess
import sys
from collections.abc import Collection, Sequence
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

    @property
    def uri(self) -> str:
        """URI of the model."""
        return self.model.resolve().as_uri()

    @property
    def repositories(self) -> Path:
        """Repositories as plain text."""
        return self.tasks.parents[1] / "data" / "repositories.jsonl"


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
    return hash_parts([b"%d" % seed, *(f.read_bytes() for f in files)])


def hash_parts(parts: Sequence[bytes]) -> str:
    """Name content by its parts, and by the version of Python that works on it."""
    parts = [*parts[:1], platform.python_version().encode(), *parts[1:]]
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
        run_python(["-m", inputs.__name__, "--out", str(made), "--seed", str(seed)], folder)
    model = folder / "policy"
    if not model.is_dir():
        manifest = str(find_manifest("warm-up.yaml"))
        run_etude(["run", manifest, "--dir", str(folder), "--plain"], folder)
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


def run_etude(words: Sequence[str], folder: Path, *, may_refuse: bool = False) -> None:
    """Run a command of `etude` to its end.

    Args:
        words: of the command, without `etude`.
        folder: to look into if it fails.
        may_refuse: take a 1, by which commands answer no, as success.

    Raises:
        UserError: it failed.
    """
    etude = "from etude.cli.main import main; main()"
    run_python(["-c", etude, *words], folder, good={0, 1} if may_refuse else {0})


def run_python(words: Sequence[str], folder: Path, *, good: Collection[int] = (0,)) -> None:
    """Run a Python program to its end.

    Raises:
        UserError: it failed.
    """
    done = subprocess.run([sys.executable, *words], check=False)
    if done.returncode not in good:
        command = " ".join(words[1:3])
        what = f"{command} ended with {done.returncode}"
        raise UserError(Problem("Internal", what, str(folder), "see its output above"))
