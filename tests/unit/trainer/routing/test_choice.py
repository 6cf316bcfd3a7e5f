"""The engine of a call: prefix owners first, then the better of two, and no hot spots."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from etude.trainer.routing.choice import HOT_LOAD_RATIO, choose_engine

# Whole tokens: a fraction below the rounding of a sum would make a tie of two different loads.
COSTS = st.dictionaries(
    st.sampled_from("abcdefgh"), st.integers(0, 1_000_000).map(float), min_size=1, max_size=8
)
CACHED = st.dictionaries(st.sampled_from("abcdefghij"), st.integers(0, 1_000), max_size=4)
SEEDS = st.integers(0, 2**32)


@given(COSTS, CACHED, SEEDS)
def test_only_an_engine_that_takes_calls_is_chosen(
    costs: dict[str, float], cached: dict[str, int], seed: int
) -> None:
    assert choose_engine(costs, cached, prompt_tokens=1_000, seed=seed) in costs


@given(COSTS, CACHED, SEEDS)
def test_the_choice_is_a_function_of_loads_prefixes_and_seed(
    costs: dict[str, float], cached: dict[str, int], seed: int
) -> None:
    backwards = dict(reversed(costs.items()))
    first = choose_engine(costs, cached, prompt_tokens=1_000, seed=seed)
    assert choose_engine(backwards, cached, prompt_tokens=1_000, seed=seed) == first


@given(COSTS, SEEDS, st.data())
def test_a_prefix_owner_that_is_no_hot_spot_is_kept(
    costs: dict[str, float], seed: int, data: st.DataObject
) -> None:
    owner = data.draw(st.sampled_from(sorted(costs)))
    found = choose_engine(costs, {owner: 10}, prompt_tokens=10, seed=seed)
    mean = sum(costs.values()) / len(costs)
    if costs[owner] <= HOT_LOAD_RATIO * mean:
        assert found == owner
    else:
        assert costs[found] + 10 * (found != owner) <= costs[owner]


@given(COSTS, SEEDS)
def test_without_a_prefix_the_heaviest_of_several_is_never_chosen(
    costs: dict[str, float], seed: int
) -> None:
    found = choose_engine(costs, {}, prompt_tokens=10, seed=seed)
    if len(set(costs.values())) == len(costs) > 1:
        assert costs[found] < max(costs.values())


def test_a_longer_prefix_beats_a_shorter_one() -> None:
    costs = {"a": 100.0, "b": 100.0, "c": 0.0}
    assert choose_engine(costs, {"a": 20, "b": 400}, prompt_tokens=500, seed=0) == "b"


def test_equal_engines_are_chosen_equally_often() -> None:
    costs = dict.fromkeys("abcd", 0.0)
    counts = Counter(choose_engine(costs, {}, prompt_tokens=9, seed=n) for n in range(4_000))
    # Four standard deviations of a binomial with p = 1/4: 110.
    assert all(abs(counts[each] - 1_000) < 110 for each in costs)
