"""Stacks of a run's processes, by a signal and their logs."""

import re
import time

from etude.cli.kubectl import pods
from etude.cli.kubectl.client import Kubectl
from etude.cli.kubectl.logs import Line, container_of, written
from etude.cli.kubectl.seen import Manifest
from etude.common.errors import Problem, UserError

SIGNAL = ("sh", "-c", "kill -USR1 1")
"""The first process of a pod is the role; it writes its stacks to its log."""
LIMIT_S = 15.0
"""Longest wait for the stacks; a process on busy cores needs seconds."""
QUIET_S = 1.0
FIRST = re.compile(r"^(Current thread|Thread) 0x")


def stacks_of(kubectl: Kubectl, pod: Manifest) -> list[Line]:
    """Have a pod's process write its stacks, and return them.

    Raises:
        UserError: it does not run, exec is denied, or it wrote none.
    """
    name = pods.name(pod)
    last = _end(kubectl, pod)
    kubectl.said("exec", name, *container_of(pod), "--", *SIGNAL)
    deadline_s = time.monotonic() + LIMIT_S
    found: list[Line] = []
    while time.monotonic() < deadline_s:
        time.sleep(QUIET_S)
        before, found = found, _since(kubectl, pod, last)
        if found and len(found) == len(before):
            return found
    if found:
        return found
    what = f"its process wrote no stacks within {LIMIT_S:.0f} s"
    fix = f"kubectl etude logs shows what it writes; kubectl describe pod {name}, whether it lives"
    raise UserError(Problem("TimedOut", what, f"pod {name}", fix))


def _end(kubectl: Kubectl, pod: Manifest) -> str:
    """Time stamp of the pod's last line, by the clock of its node; empty before the first."""
    words = ("logs", pods.name(pod), "--timestamps", "--tail=1", *container_of(pod))
    shown = kubectl.said(*words)
    return shown.partition(" ")[0].strip()


def _since(kubectl: Kubectl, pod: Manifest, last: str) -> list[Line]:
    """The lines from the first stack after a time stamp on."""
    lines = [line for line in written(kubectl, [pod], since=last) if line.time > last]
    starts = [place for place, line in enumerate(lines) if FIRST.match(line.text)]
    return lines[starts[0] :] if starts else []
