"""Whose logs are shown, and how a line of somebody else's text is shown."""

import pytest
from tests.support.seen_runs import pod, pool, run, seen

from etude.cli.kubectl.logs import Line, Wanted, chosen
from etude.cli.kubectl.pods import name
from etude.common.errors import UserError

ALL = seen(
    run(), pod(), pod("inference"), pool(), pod("node", pool="swe"), pod("node", pool="another")
)


def test_the_pods_of_a_run_are_its_own_and_those_of_its_pools() -> None:
    assert [name(each) for each in chosen(ALL, Wanted())] == [
        "demo-inference-0",
        "demo-trainer-0",
        "swe-node-0",
    ]
    assert [name(each) for each in chosen(ALL, Wanted(role="node"))] == ["swe-node-0"]


@pytest.mark.parametrize("wanted", [Wanted(role="judge"), Wanted(attempt=3)])
def test_a_role_or_attempt_without_pods_is_answered_with_what_there_is(wanted: Wanted) -> None:
    with pytest.raises(UserError) as refused:
        chosen(ALL, wanted)
    assert (
        "inference (attempt 0), node (attempt 0), trainer (attempt 0)" in refused.value.problem.fix
    )


def test_a_run_without_pods_leads_to_why() -> None:
    with pytest.raises(UserError, match="kubectl etude why demo"):
        chosen(seen(run()), Wanted())


def test_a_line_does_nothing_to_the_terminal() -> None:
    assert Line("", "demo-trainer-0", "a\x1b[2Jb").shown() == "demo-trainer-0  a␛[2Jb"
