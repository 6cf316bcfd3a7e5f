"""Kills on the real stack: engine, learner, workers, broker and sandboxes of local runs."""

import contextlib
import json
import random
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from chaos_bench.counts import Counts
from chaos_bench.history import BrokenCounts, RunHistory, read_history
from chaos_bench.kill_points import (
    KillPoint,
    Role,
    draw_points,
    find_process,
    wait_for_moment,
)
from chaos_bench.local_run import MAX_STALENESS, STEPS, LocalRun, kill, prepare
from etude.common.blobs import open_store
from etude.trainer.controller.journal.audit import JournalFinding
from etude.trainer.controller.journal.trajectory_audit import audit_trajectories, journaled_rollouts

WATCH_S = 0.5
LONGEST_WAIT_S = 4.0
"""Longest time between a step and the next kill."""
MOMENT_S = 30.0
"""Longest wait for a moment; a point that does not come is left out."""
RECOVERY_S = 420.0
"""Longest time to the next step after a kill: all processes start anew, on a busy machine."""


@dataclass(slots=True)
class RunWatch:
    """What a run's folder shows while it runs: steps lost by each take-over, and recorded turns."""

    folder: Path
    counts: Counts
    _epochs: set[int] = field(default_factory=set)
    _over: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the block runs."""
        self._epochs = self._list_epochs()
        thread = threading.Thread(target=self._watch, name="watch")
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()
            self._look()

    def _watch(self) -> None:
        while not self._over.wait(WATCH_S):
            self._look()

    def _look(self) -> None:
        for epoch in sorted(self._list_epochs() - self._epochs):
            self._epochs.add(epoch)
            self.counts.add_steps_lost(self._steps_lost(epoch))
        for segment in (self.folder / "trajectories").rglob("*.wal"):
            kept = self.folder / "kept" / segment.relative_to(self.folder)
            if not kept.exists():
                kept.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):  # its rollouts have ended
                    shutil.copyfile(segment, kept)

    def _list_epochs(self) -> set[int]:
        return {int(each.name) for each in (self.folder / "journal").glob("*")}

    def _steps_lost(self, epoch: int) -> int:
        """Steps that the controller of an epoch trains again."""
        saved = [0]
        for manifest in (self.folder / "checkpoints").glob("*/manifest.json"):
            with contextlib.suppress(FileNotFoundError):
                found = json.loads(manifest.read_text(encoding="utf-8"))
                saved += [found["step"]] if found["epoch"] < epoch else []
        newest = read_history(self.folder, before_epoch=epoch).newest_step
        return max(0, newest - max(saved))


@dataclass(slots=True)
class RealStack:
    """Kills processes of one run after another; an interrupted call goes on in the same folder."""

    folder: Path
    seed: int
    until_s: float
    """Of time.monotonic(); no process is killed later."""
    counts: Counts = field(init=False)
    manifest: Path = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.counts = Counts.load(self.folder / "counts.json")
        self.manifest = prepare(self.folder)

    def kill_all(self, kills: int) -> Counts:
        """Kill so often, and let the last run reach its end.

        Raises:
            TimeoutError: a run did not recover from a kill.
        """
        while self._may_kill(kills) or self._is_under_way():
            number = self.counts.ended
            run = LocalRun(self.folder / f"run-{number}", self.manifest)
            watch = RunWatch(run.folder, self.counts)
            try:
                with watch.watching():
                    run.start()
                    self._kill_in(run, kills)
            finally:
                run.kill_machine()
            broken = check_run(run.folder)
            self.counts.add_end(**broken._asdict())
            self.counts.save(self.folder / "counts.json")
            print(f"run {number} reached its end: {broken}", flush=True)
        return self.counts

    def _may_kill(self, kills: int) -> bool:
        return self.counts.kills < kills and time.monotonic() < self.until_s

    def _is_under_way(self) -> bool:
        return (self.folder / f"run-{self.counts.ended}").exists()

    def _kill_in(self, run: LocalRun, kills: int) -> None:
        """Kill processes of a run until it reaches its end."""
        draw = random.Random(f"{self.seed}/{self.counts.kills}")  # noqa: S311 - a simulation
        step = self._wait_for_step(run, newest_step(run.folder))
        for point in draw_points(self.seed, done=self.counts.kills):
            if not self._may_kill(kills):
                break
            time.sleep(draw.random() * LONGEST_WAIT_S)
            if run.is_complete or step >= STEPS:
                break
            if self._kill_once(run, point, draw):
                step = self._wait_for_step(run, newest_step(run.folder))
        while not run.is_complete:
            step = self._wait_for_step(run, newest_step(run.folder))
        while run.exit_code is None:
            time.sleep(WATCH_S)

    def _kill_once(self, run: LocalRun, point: KillPoint, draw: random.Random) -> bool:
        """Kill at one point; False if there was nothing to kill."""
        if not wait_for_moment(run, point.moment, limit_s=MOMENT_S):
            print(f"{point}: did not come", flush=True)
            return False
        process = None if point.role is Role.MACHINE else find_process(run, point.role, draw)
        if process is None and point.role is not Role.MACHINE:
            print(f"{point}: no process", flush=True)
            return False
        history = read_history(run.folder)
        if process is None:
            run.kill_machine()
        else:
            kill(process)
        self.counts.add_kill(str(point))
        # Whatever is in the store at a kill must be there at the end.
        with (run.folder / "acknowledged").open("a", encoding="utf-8") as known:
            known.writelines(f"{each}\n" for each in sorted(history.rollouts))
        self.counts.save(self.folder / "counts.json")
        print(f"kill {self.counts.kills}: {point}, after step {history.newest_step}", flush=True)
        if process is None:
            run.start()
        return True

    def _wait_for_step(self, run: LocalRun, step: int) -> int:
        """Wait for a step after one, or the end of the run; return the newest step.

        Raises:
            TimeoutError: none came.
            RuntimeError: the run ended otherwise.
        """
        began_s = time.monotonic()
        while (newest := newest_step(run.folder)) <= step and not run.is_complete:
            if run.exit_code:
                raise RuntimeError(f"{run.folder} ended with {run.exit_code}")
            if time.monotonic() - began_s > RECOVERY_S:
                raise TimeoutError(f"{run.folder}: no step after {step} in {RECOVERY_S:.0f} s")
            time.sleep(WATCH_S)
        print(f"  step {newest} after {time.monotonic() - began_s:.0f} s", flush=True)
        return newest


def newest_step(folder: Path) -> int:
    """The newest step in the journal of a run."""
    return read_history(folder).newest_step


def check_run(folder: Path) -> BrokenCounts:
    """Check journal and trajectory logs of a run that has reached its end."""
    history = read_history(folder)
    known = folder / "acknowledged"
    acknowledged = set(known.read_text(encoding="utf-8").split()) if known.exists() else set()
    broken = history.audit(acknowledged=acknowledged, max_staleness=MAX_STALENESS)
    gone: list[JournalFinding] = []
    rollouts = journaled_rollouts(history.objects, open_store(folder.as_uri()).get, gone)
    findings = audit_trajectories(_recorded_turns(folder), rollouts) + gone
    for each in findings:
        print(f"  {each}", flush=True)
    repeated = [each.invariant for each in findings].count("I2")
    return BrokenCounts(
        lost=broken.lost + len(findings) - repeated,
        duplicated=broken.duplicated + repeated,
        diverged=broken.diverged + count_diverged(history, steps=STEPS),
    )


def _recorded_turns(folder: Path) -> dict[str, bytes]:
    kept = folder / "kept"
    return {str(path.relative_to(kept)): path.read_bytes() for path in kept.rglob("*.wal")}


def count_diverged(history: RunHistory, *, steps: int) -> int:
    """Steps that were trained again with another result, and steps that are not there."""
    first = dict(reversed(history.steps))
    again = sum(first[number] != step for number, step in history.steps)
    return again + len(set(range(1, steps + 1)) - first.keys())
