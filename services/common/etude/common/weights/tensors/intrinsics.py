"""LLVM intrinsics for compiled loops: prefetch of scattered words, trailing zeros."""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped] # ships no types
from numba import types  # type: ignore[import-untyped] # ships no types
from numba.core import cgutils  # type: ignore[import-untyped] # ships no types
from numba.extending import intrinsic  # type: ignore[import-untyped] # ships no types

from etude.common.weights.tensors.words import Words

AHEAD = 128
"""Places between asking and using: their lines, 8 KiB, are a small part of the second level of the
cache, where they wait for their turn."""

# The second level has more lines on their way at once than the first: a scatter of 1.25 % of the
# words took 1.8 times as long with prefetches into the first level.
_FOR_READING = 0
_INTO_SECOND_LEVEL = 2
_DATA = 1


def _prefetch(
    _typing: object,
    words: Any,  # noqa: ANN401 - numba's own type of an array
    place: object,
) -> tuple[object, Callable[..., object]]:
    """LLVM's prefetch of words[place], which must exist."""

    def generate(
        context: Any,  # noqa: ANN401 - numba's code generator
        builder: Any,  # noqa: ANN401 - llvmlite's
        signature: Any,  # noqa: ANN401 - numba's
        arguments: Any,  # noqa: ANN401 - llvmlite's values
    ) -> object:
        kind = signature.args[0]
        array = context.make_array(kind)(context, builder, arguments[0])
        at = cgutils.get_item_pointer(
            context, builder, kind, array, [arguments[1]], wraparound=False, boundscheck=False
        )
        octet, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        prefetch = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [octet, number, number, number]),
            "llvm.prefetch.p0i8",
        )
        how = [number(_FOR_READING), number(_INTO_SECOND_LEVEL), number(_DATA)]
        builder.call(prefetch, [builder.bitcast(at, octet), *how])
        return context.get_dummy_value()

    return types.void(words, types.uint64), generate


prefetch: Callable[[Words, np.uint64], None] = intrinsic(_prefetch)
"""For compiled loops only."""


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
