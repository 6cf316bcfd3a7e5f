"""Lengths of interrupted completions, compared with those of all."""

from etude.trainer.rollouts.completion_counts import CompletionCounts


def test_the_ratio_compares_interrupted_completions_with_all() -> None:
    counts = CompletionCounts()
    assert counts.interrupted_length_ratio == 0
    for length, is_interrupted in ((100, False), (300, True)):
        counts.add(length, is_interrupted=is_interrupted)
    assert counts.interrupted_length_ratio == 1.5
