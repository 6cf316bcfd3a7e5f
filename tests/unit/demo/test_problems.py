"""Problems: drawn by their frequencies, never twice, and seen by the repository's own tests."""

from collections import Counter

import pytest

from etude.agent import minitest
from etude.demo.problems import ISSUES, Issue, Problem, Source
from etude.demo.variants import FREQUENCIES

COUNT = 2_000


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    return list(Source(5).take("train", COUNT))


def test_bug_classes_and_issue_kinds_have_their_shares(problems: list[Problem]) -> None:
    # Four standard errors of a share near 0.2 among 2,000.
    tolerance = 0.036
    classes = Counter(problem.repository.bug.kind for problem in problems)
    for kind, share in FREQUENCIES.items():
        assert classes[kind] / COUNT == pytest.approx(share, abs=tolerance)
    issues = Counter(problem.issue for problem in problems)
    for issue, share in ISSUES.items():
        assert issues[issue] / COUNT == pytest.approx(share, abs=0.045)


def test_the_seed_fixes_every_problem() -> None:
    one, other = (list(Source(3).take("train", 20)) for _ in range(2))
    assert one == other
    assert list(Source(4).take("train", 20)) != one


def test_no_problem_is_in_two_splits() -> None:
    source = Source(0)
    held_out = list(source.take("held-out", 200))
    train = list(source.take("train", 1_500))
    identities = [problem.repository.identity for problem in (*held_out, *train)]
    assert len(set(identities)) == len(identities)
    assert source.num_duplicates > 0, "otherwise this test shows nothing"


def test_the_visible_tests_name_the_broken_function_and_pass_once_repaired(
    problems: list[Problem],
) -> None:
    for problem in problems[:100]:
        files = problem.workspace()
        verdict = minitest.run(files)
        target = problem.repository.target
        assert verdict.output == f"FAILED test_{target.name}\n1 failed\n"
        files[target.path] = target.source().encode()
        assert minitest.run(files).output == "3 passed\n"


def test_a_broken_file_fails_only_its_own_test(problems: list[Problem]) -> None:
    problem = problems[0]
    files = problem.workspace()
    files[problem.repository.target.path] = b"def broken(:\n"
    assert minitest.run(files).output.endswith("1 failed\n")


def test_the_issue_says_as_much_as_its_kind_allows(problems: list[Problem]) -> None:
    for problem in problems[:200]:
        target = problem.repository.target
        expected = {
            Issue.FUNCTION: f"Fix {target.name}.",
            Issue.FILE: f"Bug in {target.path}.",
            Issue.NOTHING: "A test fails.",
        }
        assert problem.instruction == expected[problem.issue]
