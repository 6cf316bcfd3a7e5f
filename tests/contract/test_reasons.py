"""Reason codes: code and reference agree."""

import ast
from pathlib import Path

from etude.operator.commands.reason_reference import PAGE, meanings, page
from etude.operator.kube import interface
from etude.operator.reasons import Reason

ROOT = Path(__file__).parents[2]


def test_every_reason_has_one_sentence_of_meaning() -> None:
    assert set(meanings()) == {str(reason) for reason in Reason}
    assert all(text.strip() for text in meanings().values())


def test_the_reference_is_generated_from_the_code() -> None:
    assert (ROOT / PAGE).read_text() == page()


def test_every_code_is_used_by_the_operator() -> None:
    sources = (ROOT / "operator").rglob("*.py")
    used = {
        node.attr
        for source in sources
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Attribute)
    }
    assert {reason.name for reason in Reason} - used == set()


def test_what_an_api_server_answers_has_a_code() -> None:
    answers = (
        interface.ClusterError,
        interface.NameTakenError,
        interface.ApiRejectedError,
        interface.NamespaceClosingError,
    )
    assert {answer.reason for answer in answers} <= set(Reason)
