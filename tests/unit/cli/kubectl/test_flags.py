"""Kubectl's flags are told apart from ours, wherever they stand."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.kube.observed_runs import condition, run
from tests.support.kube.stub_kubectl import Said, StubKubectl, complaint

from etude.cli.kubectl import errors
from etude.cli.kubectl.flags import SWITCHES, VALUED, split_flags
from etude.common.errors import UserError

OURS = st.sampled_from(["why", "demo", "-o", "json", "--wait", "--role", "trainer", "-f", "-A"])
VALUES = st.text("abcdef-", min_size=1, max_size=6)
LONG = sorted(flag for flag in VALUED if flag.startswith("--"))
THEIRS = st.one_of(
    st.tuples(st.sampled_from(sorted(VALUED)), VALUES),
    st.builds(lambda flag, value: (f"{flag}={value}",), st.sampled_from(LONG), VALUES),
    st.builds(lambda flag: (flag,), st.sampled_from(sorted(SWITCHES))),
    st.builds(lambda value: (f"-n{value}",), VALUES.filter(lambda text: text[0] != "-")),
)


@given(st.lists(st.one_of(OURS.map(lambda word: ("ours", (word,))), THEIRS.map(lambda w: ("", w)))))
def test_each_word_goes_to_whom_it_is_for_in_its_order(parts: list[tuple[str, tuple[str]]]) -> None:
    typed = [word for _, words in parts for word in words]
    found = split_flags(typed)
    assert list(found.own) == [w for whose, words in parts if whose for w in words]
    assert list(found.flags) == [w for whose, words in parts if not whose for w in words]


def test_what_follows_two_dashes_is_ours() -> None:
    found = split_flags(["-n", "lab", "why", "--", "-n"])
    assert found == (("-n", "lab"), ("why", "--", "-n"))


def test_a_flag_without_its_value_is_a_usage_error() -> None:
    with pytest.raises(UserError, match="--context has no value"):
        split_flags(["why", "demo", "--context"])


def test_the_log_that_kubectl_was_asked_for_is_shown(
    stub: StubKubectl, etude: Callable[..., Any]
) -> None:
    log = "I0501 12:00:00.000000 1 round_trippers.go:632] Response: dial tcp is in it\n"
    over = condition("Complete", "True", "Finished")
    stub.teach("get rlruns.etude.dev", Said(json.dumps(run(over)), log))
    assert log in etude("suspend", "demo", "-v", "8").err
    assert log not in etude("suspend", "demo").err
    assert stub.asked("-v")[0].startswith("-v 8 get rlruns.etude.dev demo")


def test_an_answer_in_kubectls_log_is_no_complaint() -> None:
    said = "I0501 12:00:00.000000 1 x.go:1] Response: dial tcp\nerror: something new"
    assert errors.parse_error(said, "run demo").what == "error: something new"


def test_no_message_has_a_password_in_it(stub: StubKubectl, etude: Callable[..., Any]) -> None:
    stub.teach("get rlruns.etude.dev", complaint("error: something new"))
    given = ("-n", "lab", "--token=s3cret", "--password", "s3cret")
    told = etude("suspend", "demo", *given)
    assert "run demo -n lab --token=… --password …" in told.err
    assert "s3cret" not in told.err
    assert stub.asked("-n")[0].startswith(" ".join(given))
