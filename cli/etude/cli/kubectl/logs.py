"""What the pods of a run wrote: all at once in the order of time, or as they write."""

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from subprocess import Popen
from typing import NamedTuple

from etude.cli.kubectl import pods
from etude.cli.kubectl.client import RUNS, Kubectl
from etude.cli.kubectl.ends import end_of
from etude.cli.kubectl.seen import ATTEMPT, ROLE, Manifest, Seen, seen_of
from etude.cli.output import harmless, say
from etude.common.errors import Problem, UserError

LOOK_INTERVAL_S = 2.0
"""Between looks for pods that are new."""


class Line(NamedTuple):
    """One line of one pod; lines sort by time."""

    time: str
    pod: str
    text: str

    def shown(self) -> str:
        """The line after the name of its pod, harmless to a terminal."""
        return f"{self.pod}  {harmless(self.text)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Whose logs."""

    role: str = ""
    """All roles unless given."""
    attempt: int | None = None
    """All attempts unless given."""

    def takes(self, pod: Manifest) -> bool:
        """Whether these are wanted."""
        found = pods.labels(pod)
        is_role = self.role in {"", found.get(ROLE)}
        return is_role and (self.attempt is None or found.get(ATTEMPT, "0") == str(self.attempt))


def run_pods(kubectl: Kubectl, run: str) -> Seen:
    """The run and its pods.

    Raises:
        UserError: there is no such run, or we may not list pods.
    """
    found = kubectl.get(RUNS, run)
    return seen_of(found, kubectl.items("pods"))


def chosen(seen: Seen, wanted: Wanted) -> list[Manifest]:
    """The pods whose logs are wanted, by name.

    Raises:
        UserError: there are none; with those that there are.
    """
    found = sorted(filter(wanted.takes, seen.pods), key=pods.name)
    if not found:
        raise UserError(_none(seen, wanted))
    return found


def _none(seen: Seen, wanted: Wanted) -> Problem:
    if not seen.pods:
        fix = f"kubectl etude why {seen.name} says why there are none"
        return Problem("NotFound", "the run has no pods", f"run {seen.name}", fix)
    of = f" of role {wanted.role}" if wanted.role else ""
    at = f" of attempt {wanted.attempt}" if wanted.attempt is not None else ""
    there = sorted({f"{r} (attempt {a})" if a else r for r, a in map(_place, seen.pods)})
    fix = f"there are: {', '.join(there)}; pods of earlier attempts are gone with their logs"
    return Problem("NotFound", f"there is no pod{of}{at}", f"run {seen.name}", fix)


def _place(pod: Manifest) -> tuple[str, str]:
    return pods.labels(pod).get(ROLE, "?"), pods.labels(pod).get(ATTEMPT, "")


def written(
    kubectl: Kubectl, found: Sequence[Manifest], *, previous: bool = False, since: str = ""
) -> list[Line]:
    """Everything that pods wrote, in the order of time; a pod without a log is said to have none.

    Raises:
        UserError: no pod has a log.
    """
    lines: list[Line] = []
    trouble: list[UserError] = []
    for pod in found:
        try:
            lines += _log(kubectl, pods.name(pod), previous=previous, since=since)
        except UserError as error:
            trouble.append(error)
    if len(trouble) == len(found):
        raise trouble[0]
    for each in trouble:
        say(f"{each.problem.where}  {each.problem.what}")
    return sorted(lines, key=lambda line: line.time)


def _log(kubectl: Kubectl, pod: str, *, previous: bool, since: str) -> Iterator[Line]:
    more = ["--previous"] if previous else []
    more += [f"--since-time={since}"] if since else []
    for line in kubectl.said("logs", pod, "--timestamps", *more).splitlines():
        when, _, text = line.partition(" ")
        yield Line(when, pod, text)


@dataclass(slots=True)
class Follower:
    """Prints what pods write as they write it, those that come later too."""

    kubectl: Kubectl
    run: str
    wanted: Wanted
    _streams: dict[tuple[str, int], threading.Thread] = field(default_factory=dict, init=False)
    _processes: list[Popen[str]] = field(default_factory=list, init=False)
    _printing: threading.Lock = field(default_factory=threading.Lock, init=False)

    def follow(self) -> None:
        """Print until the run is over.

        Raises:
            UserError: there is no such run any more, or nobody answers.
        """
        try:
            while True:
                seen = run_pods(self.kubectl, self.run)
                for pod in filter(self.wanted.takes, seen.pods):
                    self._begin(pod)
                is_writing = any(thread.is_alive() for thread in self._streams.values())
                if end_of(seen.run) and not is_writing:
                    return
                time.sleep(LOOK_INTERVAL_S)
        finally:
            for process in self._processes:
                with suppress(OSError):
                    process.terminate()

    def _begin(self, pod: Manifest) -> None:
        """Follow a container that has started, once for each of its starts."""
        for container in pods.containers(pod):
            key = (pod["metadata"]["uid"], int(container.get("restartCount", 0)))
            if "waiting" in container.get("state", {}) or key in self._streams:
                continue
            process = self.kubectl.stream("logs", pods.name(pod), "--follow")
            self._processes.append(process)
            copying = threading.Thread(
                target=self._copy, args=(pods.name(pod), process), name=f"log-{key}", daemon=True
            )
            self._streams[key] = copying
            copying.start()

    def _copy(self, pod: str, process: Popen[str]) -> None:
        assert process.stdout is not None  # noqa: S101 - it was asked for
        for text in process.stdout:
            line = Line("", pod, text.rstrip("\n"))
            with self._printing:
                print_lines([line])
        process.wait()


def print_lines(lines: Sequence[Line]) -> None:
    """Lines for people or programs."""
    for line in lines:
        sys.stdout.write(line.shown() + "\n")
    sys.stdout.flush()
