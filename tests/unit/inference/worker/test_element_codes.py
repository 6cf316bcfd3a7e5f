"""Numbers written as weights come back, and nothing else is taken for one."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.inference.worker import element_codes
from etude.inference.worker.tensors import DTYPES, as_tensor

FORMATS = sorted(DTYPES)


def read_back(dtype: str, numbers: list[int], loads: int) -> element_codes.DigitReader:
    reader = element_codes.DigitReader(dtype, len(numbers), loads)
    for load in range(loads):
        reader.read(
            element_codes.encode_digits(np.array(numbers, np.int64), dtype, load, loads), load
        )
    return reader


@given(
    st.sampled_from(FORMATS),
    st.lists(st.integers(min_value=0, max_value=(1 << 48) - 1), min_size=1, max_size=50),
)
def test_every_number_comes_back(dtype: str, numbers: list[int]) -> None:
    loads = element_codes.num_loads({dtype, "BF16"}, max(numbers))
    assert read_back(dtype, numbers, loads).numbers().tolist() == numbers


@pytest.mark.parametrize("dtype", FORMATS)
def test_no_word_is_special_to_arithmetic(dtype: str) -> None:
    numbers = np.arange(1 << 12, dtype=np.int64)
    values = as_tensor(
        element_codes.encode_digits(numbers, dtype, 0, 2), dtype, (1 << 12,)
    ).double()
    assert torch.isfinite(values).all()
    assert (values > 0).all()
    blank = np.full(1, element_codes.BLANK_BYTE, np.uint8).repeat(8).view(np.uint64)
    assert (
        element_codes.decode_digits(
            blank.view(element_codes.encode_digits(numbers, dtype, 0, 2).dtype), dtype
        )
        < 0
    ).all()


@given(st.integers(min_value=0, max_value=(1 << 30) - 1))
def test_what_was_computed_is_no_number(number: int) -> None:
    loads = element_codes.num_loads({"BF16"}, 1 << 30)
    reader = element_codes.DigitReader("BF16", 2, loads)
    for load in range(loads):
        words = element_codes.encode_digits(
            np.array([number, number + 1], np.int64), "BF16", load, loads
        )
        words[0] += 1 << 13  # four times the value, or more
        reader.read(words, load)
    computed, kept = reader.numbers().tolist()
    assert (computed < 0, kept) == (True, number + 1)


def test_what_no_load_touches_is_constant() -> None:
    reader = element_codes.DigitReader("F32", 3, 3)
    for load in range(3):
        words = np.array([0, 0x5A5A5A5A, 0], "<u4")
        words[2] = element_codes.encode_digits(np.array([7], np.int64), "F32", load, 3)[0]
        reader.read(words, load)
    assert reader.numbers().tolist() == [element_codes.CONSTANT, element_codes.CONSTANT, 7]
