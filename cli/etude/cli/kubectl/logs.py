"""Logs and stacks of a run's pods: all lines in the order of time, or followed as they come."""

import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from subprocess import Popen
from typing import NamedTuple

from etude.cli.kubectl import errors
from etude.cli.kubectl.client import RUNS, Kubectl
from etude.cli.kubectl.diagnose import pods
from etude.cli.kubectl.diagnose.run_objects import ATTEMPT, ROLE, RunObjects, sort_objects
from etude.cli.kubectl.manifests import Manifest, labels_of, name_of, terminal_condition
from etude.cli.output import escape_controls, say
from etude.common.errors import Problem, UserError

LOOK_INTERVAL_S = 2.0
"""Between looks for pods that are new."""
STAMP = re.compile(r"\d{4}-\d\d-\d\dT\S+ ")
"""Start of a container's line; lines of kubectl or the kubelet have none."""


class LogLine(NamedTuple):
    """One line of one pod; lines sort by time."""

    time: str
    pod: str
    text: str

    def format(self) -> str:
        """The line after the name of its pod, harmless to a terminal."""
        return f"{self.pod}  {escape_controls(self.text)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFilter:
    """Choice of pods whose logs are read."""

    role: str = ""
    """All roles unless given."""
    attempt: int | None = None
    """All attempts unless given."""

    def matches(self, pod: Manifest) -> bool:
        """True if the pod's logs are chosen."""
        found = labels_of(pod)
        is_role = self.role in {"", found.get(ROLE)}
        return is_role and (self.attempt is None or found.get(ATTEMPT, "0") == str(self.attempt))


def container_flag(pod: Manifest) -> tuple[str, ...]:
    """The flag that names the container of a pod's role: users and meshes add others."""
    role = labels_of(pod).get(ROLE, "")
    names = {each["name"] for each in pod["spec"].get("containers", ())}
    return (f"--container={role}",) if role in names else ()


def get_run_pods(kubectl: Kubectl, run: str) -> RunObjects:
    """The run and its pods.

    Raises:
        UserError: there is no such run, or we may not list pods.
    """
    found = kubectl.get(RUNS, run)
    return sort_objects(found, kubectl.items("pods"))


def select_pods(seen: RunObjects, wanted: PodFilter) -> list[Manifest]:
    """The chosen pods, by name.

    Raises:
        UserError: there are none; the message lists the pods that exist.
    """
    found = sorted(filter(wanted.matches, seen.pods), key=name_of)
    if not found:
        raise UserError(_no_pods(seen, wanted))
    return found


def _no_pods(seen: RunObjects, wanted: PodFilter) -> Problem:
    if not seen.pods:
        fix = f"kubectl etude why {seen.name} says why there are none"
        return Problem("NotFound", "the run has no pods", f"run {seen.name}", fix)
    of = f" of role {wanted.role}" if wanted.role else ""
    at = f" of attempt {wanted.attempt}" if wanted.attempt is not None else ""
    there = sorted({f"{r} (attempt {a})" if a else r for r, a in map(_role_and_attempt, seen.pods)})
    fix = f"there are: {', '.join(there)}; pods of earlier attempts are gone with their logs"
    return Problem("NotFound", f"there is no pod{of}{at}", f"run {seen.name}", fix)


def _role_and_attempt(pod: Manifest) -> tuple[str, str]:
    return labels_of(pod).get(ROLE, "?"), labels_of(pod).get(ATTEMPT, "")


def read_logs(
    kubectl: Kubectl, found: Sequence[Manifest], *, previous: bool = False, since: str = ""
) -> list[LogLine]:
    """All lines of some pods, in the order of time; a pod without a log is reported.

    Raises:
        UserError: no pod has a log.
    """
    lines: list[LogLine] = []
    trouble: list[UserError] = []
    for pod in found:
        try:
            lines += _read_log(kubectl, pod, previous=previous, since=since)
        except UserError as error:
            trouble.append(error)
    if len(trouble) == len(found):
        raise trouble[0]
    for each in trouble:
        say(f"{each.problem.where}  {each.problem.what}")
    return sorted(lines, key=lambda line: line.time)


def _read_log(kubectl: Kubectl, pod: Manifest, *, previous: bool, since: str) -> Iterator[LogLine]:
    more = ["--previous"] if previous else []
    more += [f"--since-time={since}"] if since else []
    words = ("logs", name_of(pod), "--timestamps", *container_flag(pod), *more)
    for line in kubectl.run(*words).splitlines():
        when, _, text = line.partition(" ")
        yield LogLine(when, name_of(pod), text)


@dataclass(slots=True)
class _FollowedContainer:
    """State of one container start that is followed."""

    pod: str
    last: str = ""
    """Time stamp of the last line that was printed."""
    complaint: str = ""
    """Last message of kubectl about it."""
    copying: threading.Thread | None = None

    @property
    def is_read(self) -> bool:
        """True while a thread waits for its next line."""
        return self.copying is not None and self.copying.is_alive()

    def parse_line(self, text: str) -> LogLine | None:
        """Return a line to print; messages of kubectl about the log go to stderr."""
        if STAMP.match(text) is None:
            for words in errors.lines_for_people([text]):
                if words != self.complaint:
                    say(f"{self.pod}  {words}")
                self.complaint = words
            return None
        when, _, words = text.rstrip("\n").partition(" ")
        if when <= self.last:
            return None  # kubectl knows whole seconds only
        self.last = when
        return LogLine(when, self.pod, words)


@dataclass(slots=True)
class LogFollower:
    """Prints the lines of pods as they come, those of new pods too."""

    kubectl: Kubectl
    run: str
    wanted: PodFilter
    _starts: dict[tuple[str, int], _FollowedContainer] = field(default_factory=dict, init=False)
    _processes: list[Popen[str]] = field(default_factory=list, init=False)
    _printing: threading.Lock = field(default_factory=threading.Lock, init=False)
    _trouble: str = field(default="", init=False)
    """Why the last look failed."""

    def follow(self) -> None:
        """Print until the run is over; an API server that is away for a while is waited for.

        Raises:
            UserError: there is no such run, or the API server does not answer the first time.
        """
        try:
            self._follow(get_run_pods(self.kubectl, self.run))
        finally:
            for process in self._processes:
                with suppress(OSError):
                    process.terminate()

    def _follow(self, first: RunObjects) -> None:
        seen: RunObjects | None = first
        while True:
            if seen is not None:
                for pod in filter(self.wanted.matches, seen.pods):
                    self._begin(pod)
                if terminal_condition(seen.run) and not any(
                    start.is_read for start in self._starts.values()
                ):
                    return
            time.sleep(LOOK_INTERVAL_S)
            seen = self._observe()

    def _observe(self) -> RunObjects | None:
        """The run and its pods; None while the API server does not answer, which is reported once.

        Raises:
            UserError: there is no such run any more, or we may no longer look.
        """
        try:
            found = get_run_pods(self.kubectl, self.run)
        except UserError as error:
            if error.problem.reason != "Unreachable":
                raise
            if error.problem.what != self._trouble:
                say(error.problem.what)
            self._trouble = error.problem.what
            return None
        self._trouble = ""
        return found

    def _begin(self, pod: Manifest) -> None:
        """Follow a container that has started, once for each of its starts, or where it broke."""
        wanted = container_flag(pod)
        for container in pods.containers(pod):
            if wanted and wanted[0] != f"--container={container['name']}":
                continue
            key = (pod["metadata"]["uid"], int(container.get("restartCount", 0)))
            state = container.get("state", {})
            known = self._starts.get(key)
            if "waiting" in state or (known and (known.is_read or "running" not in state)):
                continue
            self._read(self._starts.setdefault(key, _FollowedContainer(name_of(pod))), wanted)

    def _read(self, start: _FollowedContainer, container: Sequence[str]) -> None:
        since = [f"--since-time={start.last}"] if start.last else []
        words = ("logs", start.pod, "--follow", "--timestamps", *container, *since)
        process = self.kubectl.stream(*words)
        self._processes.append(process)
        start.copying = threading.Thread(
            target=self._copy, args=(start, process), name=f"log-{start.pod}", daemon=True
        )
        start.copying.start()

    def _copy(self, start: _FollowedContainer, process: Popen[str]) -> None:
        assert process.stdout is not None  # noqa: S101 - it was asked for
        for text in process.stdout:
            line = start.parse_line(text)
            if line is not None:
                with self._printing:
                    print_lines([line])
        process.wait()
        self._processes.remove(process)


def print_lines(lines: Sequence[LogLine]) -> None:
    """Lines for people or programs."""
    for line in lines:
        sys.stdout.write(line.format() + "\n")
    sys.stdout.flush()


SIGNAL = ("sh", "-c", "kill -USR1 1")
"""The first process of a pod is the role; it writes its stacks to its log."""
LIMIT_S = 15.0
"""Longest wait for the stacks; a process on busy cores needs seconds."""
QUIET_S = 1.0
FIRST = re.compile(r"^(Current thread|Thread) 0x")


def read_stacks(kubectl: Kubectl, pod: Manifest) -> list[LogLine]:
    """Have a pod's process write its stacks, and return them.

    Raises:
        UserError: it does not run, exec is denied, or it wrote none.
    """
    pod_name = name_of(pod)
    last = _last_stamp(kubectl, pod)
    kubectl.run("exec", pod_name, *container_flag(pod), "--", *SIGNAL)
    deadline_s = time.monotonic() + LIMIT_S
    found: list[LogLine] = []
    while time.monotonic() < deadline_s:
        time.sleep(QUIET_S)
        before, found = found, _stacks_since(kubectl, pod, last)
        if found and len(found) == len(before):
            return found
    if found:
        return found
    what = f"its process wrote no stacks within {LIMIT_S:.0f} s"
    fix = f"see kubectl etude logs, and kubectl describe pod {pod_name}"
    raise UserError(Problem("TimedOut", what, f"pod {pod_name}", fix))


def _last_stamp(kubectl: Kubectl, pod: Manifest) -> str:
    """Time stamp of the pod's last line, by the clock of its node; empty before the first."""
    words = ("logs", name_of(pod), "--timestamps", "--tail=1", *container_flag(pod))
    shown = kubectl.run(*words)
    return shown.partition(" ")[0].strip()


def _stacks_since(kubectl: Kubectl, pod: Manifest, last: str) -> list[LogLine]:
    """The lines from the first stack after a time stamp on."""
    lines = [line for line in read_logs(kubectl, [pod], since=last) if line.time > last]
    starts = [place for place, line in enumerate(lines) if FIRST.match(line.text)]
    return lines[starts[0] :] if starts else []
