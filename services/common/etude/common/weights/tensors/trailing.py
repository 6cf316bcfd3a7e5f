"""The place of the lowest bit of a word, which numba has no name for."""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped] # ships no types
from numba import types  # type: ignore[import-untyped] # ships no types
from numba.extending import intrinsic  # type: ignore[import-untyped] # ships no types


def _trailing_zeros(
    _typing: object,
    word: Any,  # noqa: ANN401 - numba's own type of a number
) -> tuple[object, Callable[..., object]]:
    """LLVM's count of trailing zeros of a word that is not 0."""

    def generate(
        _context: object,
        builder: Any,  # noqa: ANN401 - llvmlite's
        _signature: object,
        arguments: Any,  # noqa: ANN401 - llvmlite's values
    ) -> object:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


trailing_zeros: Callable[[np.uint64], int] = intrinsic(_trailing_zeros)
"""For compiled loops only."""
