"""A token bucket allows bursts, and its rate over time."""

from etude.common.token_bucket import TokenBucket


def test_a_full_bucket_allows_a_burst_and_then_its_rate() -> None:
    bucket = TokenBucket.full(2.0, 3.0)
    for _ in range(3):
        assert bucket.wait_s() == 0.0
        bucket = bucket.take()
    assert bucket.wait_s() == 0.5
    assert bucket.refill(0.5).wait_s() == 0.0


def test_a_bucket_never_holds_more_than_its_burst() -> None:
    assert TokenBucket.full(2.0, 3.0).take().refill(100.0).tokens == 3.0


def test_an_overdrawn_bucket_is_paid_back_first() -> None:
    bucket = TokenBucket.full(2.0, 3.0).take(7.0)
    assert bucket.tokens == -4.0
    assert bucket.wait_s() == 2.5


def test_a_clock_that_is_set_back_adds_no_tokens() -> None:
    bucket = TokenBucket.full(2.0, 3.0, at_s=10.0).take(3.0).refill(5.0)
    assert (bucket.tokens, bucket.at_s) == (0.0, 10.0)
