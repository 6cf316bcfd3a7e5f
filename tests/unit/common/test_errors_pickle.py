"""Errors cross process borders whole."""

import pickle

from etude.common.errors import InvalidFieldError, Problem, UserError


def test_a_field_error_keeps_its_field() -> None:
    copy = pickle.loads(pickle.dumps(InvalidFieldError("links[0]", "is empty")))
    assert (str(copy), copy.field, copy.what) == ("links[0]: is empty", "links[0]", "is empty")


def test_a_user_error_keeps_the_way_out() -> None:
    problem = Problem("InvalidData", what="is no JSON", where="a.jsonl line 2", fix="correct it")
    copy = pickle.loads(pickle.dumps(UserError(problem)))
    assert copy.problem == problem
    assert str(copy) == problem.text()
