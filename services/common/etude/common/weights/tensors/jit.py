"""Compiled loops: the one way from here into numba."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
from numba import njit  # type: ignore[import-untyped] # numba ships no types

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Scalar = TypeVar("_Scalar", bound=np.generic)


def compiled(function: _Function) -> _Function:
    """The function as machine code.

    It runs without the interpreter's lock, so that staging threads do not stop an engine, and
    is kept on disk, so that a role does not compile at every start.
    """
    try:
        return cast("_Function", njit(nogil=True, cache=True)(function))
    except (RuntimeError, OSError):  # no folder that may be written to: a restricted pod
        return cast("_Function", njit(nogil=True)(function))


def readonly(array: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
    """A read-only, contiguous, aligned view (a copy where it must be) for a compiled loop.

    Writable and read-only arrays are two types to numba: this way it compiles each loop once.
    """
    if not (array.flags.c_contiguous and array.flags.aligned):
        # require() copies what is not aligned; ascontiguousarray() alone would not.
        array = np.require(array, requirements=["C", "A"])
    view = array.view()
    view.flags.writeable = False
    return view
