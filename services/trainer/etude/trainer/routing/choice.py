"""Choice of an engine for one call, from loads and cached prefixes. Pure.

A prefix owner keeps its calls until it is a hot spot; everything else goes to the better of two
engines drawn at random, which keeps the longest queue short without knowing all queues exactly.

Source of the second rule: Mitzenmacher, The Power of Two Choices in Randomized Load Balancing,
https://doi.org/10.1109/71.963420.
"""

from collections.abc import Mapping

from etude.trainer.seeding import derive_seed

HOT_LOAD_RATIO = 1.25
"""Load of a prefix owner over the mean, above which its calls may go elsewhere."""


def choose_engine(
    costs: Mapping[str, float],
    cached_tokens: Mapping[str, int],
    *,
    prompt_tokens: int,
    seed: int,
) -> str:
    """Choose the engine of one call.

    Args:
        costs: load of each engine that takes calls, in tokens.
        cached_tokens: tokens of the prompt that an engine has cached; engines without are absent.
        prompt_tokens: length of the prompt.
        seed: of the random pair; equal loads and seeds give equal choices.

    Returns:
        The engine with the longest cached prefix, unless its load exceeds 1.25 times the mean.
        Then, or if no prefix is cached, the cheapest of that engine and a random pair, where a
        prompt's tokens that are not cached count as load.

    Raises:
        ValueError: there is no engine.
    """
    targets = sorted(costs)
    if not targets:
        raise ValueError("there is no engine to choose")
    owner = _prefix_owner(costs, cached_tokens)
    mean = sum(costs.values()) / len(costs)
    if owner is not None and costs[owner] <= HOT_LOAD_RATIO * mean:
        return owner
    candidates = _random_pair(targets, seed)
    if owner is not None:
        candidates = (owner, *candidates)
    # Of equal ones the first: the owner, then the random order of the pair.
    return min(
        candidates,
        key=lambda each: costs[each] + max(0, prompt_tokens - cached_tokens.get(each, 0)),
    )


def _prefix_owner(costs: Mapping[str, float], cached_tokens: Mapping[str, int]) -> str | None:
    """The engine with the longest cached prefix, of equal ones the least loaded."""
    owners = [target for target in sorted(costs) if cached_tokens.get(target, 0) > 0]
    if not owners:
        return None
    return min(owners, key=lambda each: (-cached_tokens[each], costs[each]))


def _random_pair(targets: list[str], seed: int) -> tuple[str, ...]:
    """Two different engines, or the only one."""
    first = derive_seed(seed, "first engine") % len(targets)
    rest = targets[:first] + targets[first + 1 :]
    if not rest:
        return (targets[first],)
    return targets[first], rest[derive_seed(seed, "second engine") % len(rest)]
