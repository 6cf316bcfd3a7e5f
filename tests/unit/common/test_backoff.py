"""Delays double up to the longest, and start again after a success."""

from etude.common.backoff import Backoff


def test_delays_double_up_to_the_longest() -> None:
    backoff = Backoff(1.0, 5.0)
    assert [backoff.next_s() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_a_success_starts_again() -> None:
    backoff = Backoff(1.0, 5.0)
    backoff.next_s()
    backoff.reset()
    assert backoff.next_s() == 1.0
