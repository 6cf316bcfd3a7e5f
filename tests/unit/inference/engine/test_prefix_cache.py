"""Requests share cached prefixes only where the oldest weights behind them are known."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.weights import VersionId
from etude.inference.engine import prefix_cache
from etude.inference.engine.prefix_cache import CacheAdmission, PrefixCacheSalts


def v(number: int) -> VersionId:
    return VersionId(1, number)


def test_salted_requests_share_inside_one_version() -> None:
    found = PrefixCacheSalts("Salted")
    assert found.admit(v(3), "a") == CacheAdmission(v(3), "1.3")
    assert found.admit(v(4), "a") == CacheAdmission(v(4), "1.4")


def test_a_sticky_episode_keeps_its_first_salt_until_it_is_too_old() -> None:
    found = PrefixCacheSalts("Sticky", 3)
    taken = [found.admit(v(number), "a").oldest.number for number in range(8)]
    assert taken == [0, 0, 0, 3, 3, 3, 6, 6]
    assert found.admit(v(7), "b") == CacheAdmission(v(7), "1.7")
    assert found.admit(v(7)) == CacheAdmission(v(7), "1.7")


def test_without_salts_all_share_what_was_cached_since_the_swap() -> None:
    assert PrefixCacheSalts("Reset").admit(v(3), "a") == CacheAdmission(v(3), "")


def test_a_dropped_cache_holds_nothing_old() -> None:
    found = PrefixCacheSalts("Sticky", 9)
    found.admit(v(3), "a")
    found.clear()
    assert found.admit(v(4), "a").oldest == v(4)


def test_going_back_never_takes_a_salt_of_newer_weights() -> None:
    found = PrefixCacheSalts("Sticky", 9)
    found.admit(v(5), "a")
    assert found.admit(v(4), "a").oldest == v(4)


def test_episodes_are_forgotten_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "MAX_ROLLOUTS", 2)
    found = PrefixCacheSalts("Sticky", 9)
    for name in "abac":
        found.admit(v(1), name)
    assert [found.admit(v(2), name).oldest for name in "acb"] == [v(1), v(1), v(2)]


@given(st.integers(1, 6), st.randoms(use_true_random=False))
def test_no_request_meets_entries_that_are_older_than_it_says(
    lag: int, draw: random.Random
) -> None:
    found, live = PrefixCacheSalts("Sticky", lag), 0
    written: dict[str, int] = {}  # oldest weights that wrote an entry, by salt
    for _ in range(60):
        live += draw.random() < 0.4
        taken = found.admit(v(live), draw.choice("abcd"))
        written.setdefault(taken.salt, live)
        assert taken.oldest.number <= written[taken.salt]
        assert live - taken.oldest.number < lag
