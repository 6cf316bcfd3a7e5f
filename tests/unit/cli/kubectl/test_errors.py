"""What kubectl says on stderr becomes one problem in three parts."""

import pytest

from etude.cli.kubectl import errors
from etude.cli.output import CODES

GET = "https://10.0.0.1:6443/api?timeout=20s"
CASES = [
    (
        'Error from server (NotFound): rlruns.etude.dev "demo" not found',
        *("NotFound", 3, "there is no run demo", "kubectl get rlr -A"),
    ),
    (
        'Error from server (NotFound): namespaces "lab" not found',
        *("NotFound", 3, "there is no namespace lab", "kubectl get namespaces"),
    ),
    (
        'error: the server doesn\'t have a resource type "rlruns"',
        *("NotInstalled", 3, "this cluster knows no rlruns", "helm install etude"),
    ),
    (
        'Error from server (Forbidden): rlruns.etude.dev "demo" is forbidden: User "eve" cannot'
        ' patch resource "rlruns" in API group "etude.dev" in the namespace "lab"',
        *("Forbidden", 5, "eve may not patch rlruns in namespace lab", "verb patch on rlruns"),
    ),
    (
        'Error from server (Forbidden): pods is forbidden: User "eve" cannot list resource "pods"'
        ' in API group "" at the cluster scope',
        *("Forbidden", 5, "eve may not list pods in all namespaces", "API group core"),
    ),
    (
        "error: You must be logged in to the server (Unauthorized)",
        *("Forbidden", 5, "does not know you", "kubectl auth whoami"),
    ),
    (
        'error: context "x" does not exist',
        *("Usage", 2, 'context "x" does not exist', "kubectl config get-contexts"),
    ),
    (
        f'E1122 16:37:57.283441    8421 memcache.go:265] "Unhandled Error" err="couldn\'t get'
        f' current server API group list: Get \\"{GET}\\": dial tcp 10.0.0.1:6443: refused"\n'
        "The connection to the server 10.0.0.1:6443 was refused - did you specify the right host?",
        *("Unreachable", 6, "The connection to the server 10.0.0.1:6443", "kubectl cluster-info"),
    ),
    (
        'Error from server (BadRequest): previous terminated container "trainer" in pod'
        ' "demo-trainer-0" not found',
        *("NotFound", 3, "container trainer has not ended", "leave out --previous"),
    ),
    (
        'Error from server (BadRequest): container "trainer" in pod "demo-trainer-0" is waiting'
        " to start: trying and failing to pull image",
        *("NotFound", 3, "trying and failing to pull image", "kubectl etude why"),
    ),
    (
        "Unable to connect to the server: net/http: TLS handshake timeout",
        *("Unreachable", 6, "TLS handshake timeout", "kubectl cluster-info"),
    ),
    (
        'The RLRun "demo" is invalid: spec.model: Invalid value: immutable',
        *("InvalidSpec", 4, "spec.model: Invalid value", "change what the message names"),
    ),
    (
        'Error from server (Forbidden): error when creating "STDIN": checkpoints.etude.dev "demo-1"'
        " is forbidden: ValidatingAdmissionPolicy 'authors.etude' with binding 'authors.etude'"
        " denied request: spec.reason: only the operator registers what a run has saved",
        *("Denied", 4, "policy authors.etude refuses it: spec.reason: only the operator", "owner"),
    ),
    (
        "The rlruns \"demo\" is invalid: : ValidatingAdmissionPolicy 'sizes' with binding 'b'"
        " denied request: failed expression: object.spec.size < 3",
        *("Denied", 4, "policy sizes refuses it: failed expression", "change what it names"),
    ),
    (
        'Error from server (Forbidden): admission webhook "quota.lab" denied the request: no more',
        *("Denied", 4, "policy quota.lab refuses it: no more", "change what it names"),
    ),
    (
        'Error from server: admission webhook "quota.lab" denied the request without explanation',
        *("Denied", 4, "policy quota.lab refuses it: it does not say why", "ask the owner of"),
    ),
    (
        'Error from server (InternalError): Internal error occurred: failed calling webhook "a.b":'
        ' failed to call webhook: Post "https://a.b.svc:443/": dial tcp 10.0.0.9:443: refused',
        *("WebhookFailed", 4, 'failed calling webhook "a.b"', "the owner of this webhook"),
    ),
]
HICCUPS = (
    "Error from server (ServiceUnavailable): the server is currently unable to handle the request",
    "Error from server (TooManyRequests): the server has received too many requests",
    "Error from server (Timeout): the server was unable to return a response in the time allotted",
    "Error from server (ServerTimeout): the server cannot complete the requested operation",
    "Error from server (InternalError): an error on the server has prevented the request",
    "Error from server: etcdserver: leader changed",
    "Error from server: etcdserver: request timed out",
    "error: unexpected EOF",
    "error: http2: client connection lost",
    'error: Patch "https://10.0.0.1:6443/apis": EOF',
    "error: read tcp 10.0.0.2:55->10.0.0.1:6443: read: connection reset by peer",
)


@pytest.mark.parametrize(("said", "reason", "code", "what", "fix"), CASES)
def test_a_known_error_has_a_suggested_fix(
    said: str, reason: str, code: int, what: str, fix: str
) -> None:
    found = errors.parse_error(said, "run demo")
    assert found.reason == reason
    assert CODES.get(reason, 4) == code
    assert what in found.what
    assert fix in found.fix
    assert found.where == "run demo"
    assert "\n" not in found.what


@pytest.mark.parametrize("said", HICCUPS)
def test_what_an_api_server_says_that_is_not_itself_for_a_moment_is_nobody_who_answers(
    said: str,
) -> None:
    found = errors.parse_error(said, "run demo")
    assert (found.reason, CODES[found.reason]) == ("Unreachable", 6)
    assert said in found.what
    assert "try again" in found.fix


@pytest.mark.parametrize(
    "said",
    [
        "Error from server: etcdserver: request is too large",
        "Error from server: etcdserver: mvcc: database space exceeded",
    ],
)
def test_what_does_not_pass_by_itself_is_no_hiccup(said: str) -> None:
    assert errors.parse_error(said, "run demo").reason == "KubectlFailed"


def test_words_that_we_do_not_know_are_passed_on_without_kubectls_own_log() -> None:
    said = "error: something new\nW0101 10:00:00.000000 1 x.go:1] noise\nWarning: deprecated\n"
    assert errors.parse_error(said, "run demo").what == "error: something new"
    assert "said nothing" in errors.parse_error("", "run demo").what
