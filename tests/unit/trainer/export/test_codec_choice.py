"""The codec follows the link: small where bytes are slow, fast where they are not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.weights.coding.codecs.ids import Codec
from etude.trainer.export.codec_choice import (
    FAST_BYTES_PER_S,
    LEAST_BYTES,
    MOST_UNMEASURED,
    SLOW_BYTES_PER_S,
    UplinkMeter,
)

MB = 1_000_000


def after(*rates: float, num_bytes: int = LEAST_BYTES) -> UplinkMeter:
    """A link over which so many bytes went at each of these rates, in bytes/s."""
    link = UplinkMeter()
    for rate in rates:
        link.record_upload(num_bytes, num_bytes / rate)
    return link


@pytest.mark.parametrize(("wanted", "codec"), [("L1", Codec.L1), ("L2", Codec.L2)])
def test_what_is_asked_for_by_name_is_taken_on_any_link(wanted: str, codec: Codec) -> None:
    assert after(1_000).choose_codec(wanted) is codec
    assert after(1_000 * MB).choose_codec(wanted) is codec


def test_a_link_that_was_never_used_is_taken_for_a_fast_one() -> None:
    assert UplinkMeter().choose_codec("Auto") is Codec.L1


def test_a_slow_link_is_worth_the_time_of_the_smallest_codec() -> None:
    assert after(SLOW_BYTES_PER_S / 2).choose_codec("Auto") is Codec.L2R
    assert after(SLOW_BYTES_PER_S * 2).choose_codec("Auto") is Codec.L1


def test_small_uploads_say_nothing() -> None:
    assert after(1_000, num_bytes=LEAST_BYTES - 1).choose_codec("Auto") is Codec.L1


def test_a_link_of_which_nothing_was_heard_for_long_is_taken_for_a_fast_one_again() -> None:
    link = after(SLOW_BYTES_PER_S / 2)
    for _ in range(MOST_UNMEASURED):
        link.record_upload(LEAST_BYTES - 1, 1.0)
    assert link.choose_codec("Auto") is Codec.L2R
    link.record_upload(LEAST_BYTES - 1, 1.0)
    assert link.choose_codec("Auto") is Codec.L1


def test_one_upload_among_many_does_not_decide() -> None:
    slow, fast = SLOW_BYTES_PER_S / 2, 10 * FAST_BYTES_PER_S
    assert after(slow, slow, slow, 1_000 * MB).choose_codec("Auto") is Codec.L2R
    assert after(fast, fast, fast, 1.0).choose_codec("Auto") is Codec.L1


@given(rates=st.lists(st.floats(SLOW_BYTES_PER_S, FAST_BYTES_PER_S), max_size=20))
def test_a_rate_between_the_limits_changes_nothing(rates: list[float]) -> None:
    assert after(10 * FAST_BYTES_PER_S, *rates).choose_codec("Auto") is Codec.L1
    inside = [rate * 0.999 for rate in rates]
    assert after(SLOW_BYTES_PER_S / 10, *inside).choose_codec("Auto") is Codec.L2R


@given(rates=st.lists(st.floats(1.0, 1e12), max_size=20))
def test_a_link_that_becomes_fast_is_found_to_be(rates: list[float]) -> None:
    assert after(*rates, *[1e12] * 100).choose_codec("Auto") is Codec.L1
