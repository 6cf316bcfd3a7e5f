"""Error messages of kubectl as problems with a suggested fix."""

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from etude.common.errors import Problem

INSTALL = (
    "install the chart once: helm install etude helm/etude --namespace etude-system"
    " --create-namespace --set image=IMAGE"
)
_QUIET = re.compile(r"^[EWI]\d{4} \d\d:\d\d:\d\d|^Warning: ")
"""Lines of kubectl's own log, and warnings of the API server: not errors."""

_NOUNS = {
    "rlruns.etude.dev": ("run", "rlr"),
    "policyroutes.etude.dev": ("route", "policyroute"),
    "evalruns.etude.dev": ("evaluation", "evalrun"),
}
"""Word for a kind in messages, and the one for kubectl."""


class KnownError(NamedTuple):
    """One known error message."""

    words: re.Pattern[str]
    problem: Callable[[re.Match[str], str], Problem]
    """Makes the problem from the match and the subject of the command."""


def _not_found(match: re.Match[str], where: str) -> Problem:
    if match["kind"] == "namespaces":
        fix = "kubectl get namespaces lists what there is"
        return Problem("NotFound", f"there is no namespace {match['name']}", where, fix)
    kind, short = _NOUNS.get(match["kind"], (match["kind"], match["kind"]))
    fix = f"kubectl get {short} -A lists those of all namespaces; -n names another one"
    return Problem("NotFound", f"there is no {kind} {match['name']}", where, fix)


def _not_installed(match: re.Match[str], where: str) -> Problem:
    return Problem("NotInstalled", f"this cluster knows no {match['kind']}", where, INSTALL)


def _forbidden(match: re.Match[str], where: str) -> Problem:
    place = f"in namespace {match['namespace']}" if match["namespace"] else "in all namespaces"
    group = match["group"] or "core"
    return Problem(
        "Forbidden",
        f"{match['user']} may not {match['verb']} {match['resource']} {place}",
        where,
        f"ask for a Role with verb {match['verb']} on {match['resource']} of API group {group}",
    )


def _unauthorized(_match: re.Match[str], where: str) -> Problem:
    fix = "log in to the cluster again; kubectl auth whoami shows who you are"
    return Problem("Forbidden", "the API server does not know you", where, fix)


def _bad_context(match: re.Match[str], where: str) -> Problem:
    fix = "kubectl config get-contexts lists what there is"
    return Problem("Usage", match[0].removeprefix("error: "), where, fix)


def _unreachable(match: re.Match[str], where: str) -> Problem:
    fix = "kubectl cluster-info says the same; check the context, the network and the VPN"
    return Problem("Unreachable", match[0], where, fix)


def _transient(match: re.Match[str], where: str) -> Problem:
    fix = "it usually passes: try again; kubectl get --raw '/readyz?verbose' shows failed checks"
    what = f"the API server does not answer as it should: {match[0].strip()}"
    return Problem("Unreachable", what, where, fix)


def _denied(match: re.Match[str], where: str) -> Problem:
    why = match["why"] or "it does not say why"
    fix = f"change what it names, or ask the owner of {match['policy']} in this cluster"
    return Problem("Denied", f"policy {match['policy']} refuses it: {why}", where, fix)


def _webhook_failed(match: re.Match[str], where: str) -> Problem:
    fix = "ask the owner of this webhook in the cluster: the API server does nothing without it"
    return Problem("WebhookFailed", match[0], where, fix)


def _refused(match: re.Match[str], where: str) -> Problem:
    return Problem("InvalidSpec", match[0], where, "change what the message names")


def _no_earlier(match: re.Match[str], where: str) -> Problem:
    what = f"container {match['container']} has not ended and restarted"
    return Problem("NotFound", what, where, "leave out --previous")


def _not_started(match: re.Match[str], where: str) -> Problem:
    what = f"its container has written nothing: {match['why']}"
    return Problem("NotFound", what, where, "kubectl etude why RUN says what it waits for")


KNOWN_ERRORS = (
    KnownError(
        re.compile(
            r"ValidatingAdmissionPolicy '(?P<policy>[^']*)' with binding '[^']*' denied request:"
            r" *(?P<why>.*)"
        ),
        _denied,
    ),
    KnownError(
        re.compile(
            r'admission webhook "(?P<policy>[^"]*)" denied the request'
            r"(?: without explanation|:) *(?P<why>.*)"
        ),
        _denied,
    ),
    # Its words are those of a network that fails, but not of the one to the API server.
    KnownError(
        re.compile(r'(failed calling webhook "|conversion webhook for ).*'), _webhook_failed
    ),
    KnownError(re.compile(r'previous terminated container "(?P<container>[^"]*)"'), _no_earlier),
    KnownError(re.compile(r"is waiting to start: (?P<why>.*)"), _not_started),
    KnownError(
        re.compile(
            r'forbidden: User "(?P<user>[^"]*)" cannot (?P<verb>\w+) resource "(?P<resource>[^"]*)"'
            r' in API group "(?P<group>[^"]*)"(?: in the namespace "(?P<namespace>[^"]*)")?'
        ),
        _forbidden,
    ),
    KnownError(
        re.compile(r"the server doesn't have a resource type \"(?P<kind>[^\"]*)\""), _not_installed
    ),
    KnownError(
        re.compile(r'no matches for kind "(?P<kind>[^"]*)" in version "etude.dev'), _not_installed
    ),
    KnownError(re.compile(r'\(NotFound\): (?P<kind>\S+) "(?P<name>[^"]*)" not found'), _not_found),
    KnownError(re.compile(r"\(Unauthorized\)|must be logged in to the server"), _unauthorized),
    KnownError(
        re.compile(r".*(context \"[^\"]*\" does not exist|context was not found).*"), _bad_context
    ),
    KnownError(re.compile(r".*(stat .*: no such file|error loading config file).*"), _bad_context),
    KnownError(
        re.compile(r"(The connection to the server|Unable to connect to the server).*"),
        _unreachable,
    ),
    KnownError(
        re.compile(r"(Get \\?\"https?://|dial tcp|Client\.Timeout exceeded).*"), _unreachable
    ),
    KnownError(
        re.compile(
            r"Error from server \((ServiceUnavailable|TooManyRequests|Timeout|ServerTimeout"
            r"|InternalError)\): .*"
        ),
        _transient,
    ),
    KnownError(
        re.compile(r".*etcdserver: (leader changed|no leader|request timed out|too many).*"),
        _transient,
    ),
    KnownError(
        re.compile(
            r".*(unexpected EOF|connection reset by peer|client connection lost|GOAWAY|: EOF$).*",
            re.MULTILINE,
        ),
        _transient,
    ),
    KnownError(re.compile(r"The RLRun .* is invalid: .*"), _refused),
)


def parse_error(said: str, where: str) -> Problem:
    """The problem of the first known error message; kubectl's last line otherwise."""
    lines = list(lines_for_people(said.splitlines()))
    heard = "\n".join(lines)  # without its log, which has whole answers in it at -v 8
    for kind in KNOWN_ERRORS:
        match = kind.words.search(heard)
        if match is not None:
            return kind.problem(match, where)
    last = lines[-1] if lines else "kubectl failed and said nothing"
    return Problem("KubectlFailed", last, where, "repeat it with kubectl alone: it says the same")


def lines_for_people(lines: Iterable[str]) -> Iterable[str]:
    """The lines for people: without log lines and warnings."""
    return (line.strip() for line in lines if line.strip() and not _QUIET.match(line))
