"""Flags of kubectl, taken out of a command line of the plugin."""

from collections.abc import Sequence
from typing import NamedTuple

from etude.common.errors import Problem, UserError

VALUED = {
    *("-n", "--namespace", "--context", "--kubeconfig", "--kuberc", "--cluster", "--user"),
    *("--as", "--as-group", "--as-uid", "--as-user-extra", "--token", "--username", "--password"),
    *("-s", "--server", "--request-timeout", "--certificate-authority", "--client-certificate"),
    *("--client-key", "--tls-server-name", "--cache-dir"),
    *("-v", "--v", "--vmodule", "--log-flush-frequency", "--profile", "--profile-output"),
}
"""Flags that every kubectl command takes, with a value."""
SWITCHES = {
    *("--insecure-skip-tls-verify", "--disable-compression"),
    *("--match-server-version", "--warnings-as-errors"),
}
"""Those without one. --version is left out: it prints kubectl's and does nothing else."""

SECRET = {"--token", "--password"}
"""Flags whose values are secret and left out of messages."""


class CommandLine(NamedTuple):
    """A command line in two parts."""

    flags: tuple[str, ...]
    """For kubectl, as they were typed."""
    own: tuple[str, ...]
    """For the verb."""


def split_flags(words: Sequence[str]) -> CommandLine:
    """Take kubectl's flags out of a command line; what follows `--` is left as it is.

    Raises:
        UserError: a flag has no value.
    """
    flags: list[str] = []
    own: list[str] = []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        if word == "--":
            own += [word, *waiting]
            break
        if word in VALUED:
            if not waiting:
                raise UserError(_no_value(word))
            flags += [word, waiting.pop(0)]
        elif _is_whole(word):
            flags.append(word)
        else:
            own.append(word)
    return CommandLine(tuple(flags), tuple(own))


def redact_flags(flags: Sequence[str]) -> list[str]:
    """Flags for a message, secrets replaced: it may end up in the log of a job."""
    found: list[str] = []
    for flag in flags:
        name, is_given, _ = flag.partition("=")
        before = found[-1] if found else ""
        if before in SECRET:
            found.append("…")
        else:
            found.append(f"{name}=…" if name in SECRET and is_given else flag)
    return found


def _is_whole(word: str) -> bool:
    """True for a flag of kubectl that holds its value or takes none."""
    if word.startswith("--"):
        return word.partition("=")[0] in VALUED | SWITCHES
    return len(word) > 2 and word[:2] in VALUED


def _no_value(flag: str) -> Problem:
    return Problem("Usage", f"{flag} has no value", "kubectl etude", f"give it one: {flag} VALUE")
