"""Client of the API server: the user's kubectl with its contexts, credentials and flags."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from etude.cli.kubectl import errors, flags
from etude.cli.kubectl.manifests import Manifest
from etude.cli.output import escape_controls
from etude.common.errors import Problem, UserError

REQUEST_LIMIT = "--request-timeout=20s"
"""Time until an API server that does not answer counts as unreachable."""
RUNS = "rlruns.etude.dev"
POOLS = "envpools.etude.dev"
CHECKPOINTS = "checkpoints.etude.dev"
ROUTES = "policyroutes.etude.dev"
EVALUATIONS = "evalruns.etude.dev"
NOUNS = {
    RUNS: "run",
    POOLS: "pool",
    CHECKPOINTS: "checkpoint",
    ROUTES: "route",
    EVALUATIONS: "evaluation",
}
"""Name of each kind in messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kubectl:
    """Runs kubectl with the flags that the user gave."""

    flags: tuple[str, ...] = ()
    program: str = "kubectl"

    def get(self, *what: str) -> Manifest:
        """Get an object or a list of objects.

        Raises:
            UserError: it does not exist, access is denied, or the API server does not answer.
        """
        found: Manifest = json.loads(self.run("get", *what, "-o", "json", *self._limit()))
        return found

    def items(self, *what: str) -> list[Manifest]:
        """Get the objects of a list.

        Raises:
            UserError: access is denied, or the API server does not answer.
        """
        found: list[Manifest] = self.get(*what)["items"]
        return found

    def patch(self, kind: str, name: str, change: Manifest) -> Manifest:
        """Change an object and return it.

        Raises:
            UserError: it does not exist, access is denied, or the change is refused.
        """
        words = ("patch", kind, name, "--type=merge", "-p", json.dumps(change), "-o", "json")
        changed: Manifest = json.loads(self.run(*words, *self._limit()))
        return changed

    def create(self, manifest: Manifest) -> Manifest:
        """Create an object and return it.

        Raises:
            UserError: access is denied, or the object is refused.
        """
        words = ("create", "-f", "-", "-o", "json", *self._limit())
        made: Manifest = json.loads(self.run(*words, given=json.dumps(manifest)))
        return made

    def run(self, *words: str, given: str | None = None) -> str:
        """Run one command and return its output.

        Args:
            words: the command.
            given: its standard input.

        Raises:
            UserError: it fails, with its error message as a problem.
        """
        done = self._call(words, given)
        if self._is_verbose:
            sys.stderr.write(escape_controls(done.stderr))
        if done.returncode:
            raise UserError(errors.parse_error(done.stderr, self._subject(words)))
        return done.stdout

    def stream(self, *words: str) -> "subprocess.Popen[str]":
        """Start a command that goes on printing; both of its streams are merged.

        Raises:
            UserError: kubectl is not installed.
        """
        return subprocess.Popen(
            self._command(words),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    @property
    def _is_verbose(self) -> bool:
        """True if a flag asks for kubectl's log."""
        return any(flag == "--v" or flag.startswith(("-v", "--v=")) for flag in self.flags)

    def _call(self, words: Sequence[str], given: str | None) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            self._command(words),
            input=given,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )

    def _command(self, words: Sequence[str]) -> list[str]:
        program = shutil.which(self.program)
        if program is None:
            fix = "install kubectl 1.32 or newer, and put it on PATH"
            raise UserError(Problem("Usage", "there is no kubectl on PATH", "this machine", fix))
        return [program, *self.flags, *words]

    def _subject(self, words: Sequence[str]) -> str:
        """Subject of a command for messages, such as `run demo -n lab`."""
        if words[0] in {"get", "patch"}:
            kind, name = NOUNS.get(words[1], words[1]), words[2]
        else:
            kind, name = "pod", words[1]
        what = "kubectl" if name.startswith("-") else f"{kind} {name}"
        return " ".join((what, *flags.redact_flags(self.flags)))

    def _limit(self) -> tuple[str, ...]:
        given = any(flag.startswith("--request-timeout") for flag in self.flags)
        return () if given else (REQUEST_LIMIT,)
