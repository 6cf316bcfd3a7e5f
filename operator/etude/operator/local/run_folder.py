"""Run folder: its lock, and the objects that persist between two runtimes."""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from etude.common import atomic
from etude.common.errors import Problem, UserError
from etude.common.run_folder.lock import LOCK
from etude.operator.kind_registry import KINDS_BY_NAME
from etude.operator.manifests import Manifest, condition, is_true, ref

OBJECTS = "objects.json"
LOCK_TRIES, LOCK_PAUSE_S = 5, 0.05
"""Commands that ask for the state of a run hold the lock for an instant."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock the folder; the lock ends with the process.

    Raises:
        UserError: another runtime holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+") as lock:
        if not _take(lock):
            lock.seek(0)
            holder = lock.read().strip() or "?"
            raise UserError(
                Problem(
                    reason="Conflict",
                    what=f"process {holder} already runs this run",
                    where=str(folder),
                    fix=f"etude watch {folder}, or etude stop {folder}",
                )
            )
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        try:
            yield
        finally:
            lock.truncate(0)  # the next runtime takes the lock before it writes its own id


def _take(lock: TextIO) -> bool:
    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOCK_PAUSE_S)
        else:
            return True
    return False


def load_objects(folder: Path) -> list[Manifest]:
    """Load the objects of the last runtime; none in a new folder."""
    path = folder / OBJECTS
    if not path.exists():
        return []
    found: list[Manifest] = json.loads(path.read_bytes())
    written_s = path.stat().st_mtime
    return [KINDS_BY_NAME[m["kind"]].restore(m, written_s) for m in found]


def load_run(folder: Path, run: Manifest) -> Manifest | None:
    """The run of the last runtime; None in a new folder.

    Raises:
        UserError: the folder holds another run.
    """
    last = next((m for m in load_objects(folder) if m["kind"] == "RLRun"), None)
    if last is not None and ref(last) != ref(run):
        what = f"the folder holds the run {last['metadata']['name']}"
        fix = "give this run a folder of its own: --dir FOLDER"
        raise UserError(Problem("Conflict", what, str(folder), fix))
    return last


def load_evaluated_run(folder: Path) -> Manifest:
    """The run of a folder as it is while one of its checkpoints is evaluated: it does not go on.

    Raises:
        UserError: the folder holds no run.
    """
    run = next((m for m in load_objects(folder) if m["kind"] == "RLRun"), None)
    if run is None:
        fix = "name the folder of a run with checkpoints: --dir runs/NAME"
        raise UserError(Problem("InvalidSpec", "holds no run to evaluate", str(folder), fix))
    return run if is_true(run, "Complete") else {**run, "spec": {**run["spec"], "suspend": True}}


def refuse_changed_evaluation(folder: Path, evaluation: Manifest) -> None:
    """Refuse an evaluation whose name another one of the folder has: its result is of that spec.

    Raises:
        UserError: the folder holds an evaluation of this name with another spec.
    """
    known = next((m for m in load_objects(folder) if ref(m) == ref(evaluation)), None)
    if known is not None and known["spec"] != evaluation["spec"]:
        name = evaluation["metadata"]["name"]
        what = f"the folder has an evaluation {name} with another spec"
        fix = "give this one another metadata.name"
        raise UserError(Problem("Conflict", what, str(folder), fix))


def save_objects(folder: Path, objects: Sequence[Manifest]) -> None:
    """Save the objects that outlive the runtime, atomically."""
    kept = [manifest for manifest in objects if manifest["kind"] in KINDS_BY_NAME]
    atomic.write_text(folder / OBJECTS, json.dumps(kept, separators=(",", ":")))


def run_outcome(run: Manifest) -> str | None:
    """Complete, Failed or Suspended, once that holds for the present spec of the run."""
    generation = run.get("metadata", {}).get("generation")
    for kind in ("Complete", "Failed", "Suspended"):
        fact = condition(run, kind)
        if fact.get("status") == "True" and fact.get("observedGeneration") == generation:
            return kind
    return None


def outcome_message(run: Manifest) -> str:
    """Reason and message of the outcome."""
    found = run_outcome(run)
    fact = condition(run, found) if found else {}
    return ": ".join(part for part in (fact.get("reason", ""), fact.get("message", "")) if part)
