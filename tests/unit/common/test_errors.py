"""Errors that cross a process arrive as what they were."""

import pickle

import pytest

from etude.common.errors import (
    CorruptError,
    EtudeError,
    FullError,
    InvalidFieldError,
    Problem,
    UserError,
)


@pytest.mark.parametrize(
    "error",
    [
        CorruptError("damaged"),
        FullError("no room", retry_after_s=1.5),
        InvalidFieldError("clipLow", "too small"),
        UserError(Problem(reason="R", what="w", where="here", fix="f")),
    ],
)
def test_an_error_survives_pickling_with_its_fields(error: EtudeError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), vars(copy)) == (str(error), vars(error))
