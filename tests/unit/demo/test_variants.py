"""The table of words, verbs and mistakes that the demo's tasks are drawn from."""

import itertools
from collections import Counter
from random import Random

import pytest

from etude.demo import cases, words
from etude.demo.repositories import Function, Variant
from etude.demo.variants import FREQUENCIES, VERBS, BugClass

LISTS = {
    "packages": words.PACKAGES,
    "modules": words.MODULES,
    "nouns": words.NOUNS,
    "first parameters": words.FIRST_PARAMETERS,
    "second parameters": words.SECOND_PARAMETERS,
    "lists": words.LISTS,
}
VARIANTS = [Variant(verb, bug) for verb in VERBS for bug in verb.bugs]


def test_no_word_stands_for_two_slots() -> None:
    for one, other in itertools.combinations(LISTS, 2):
        assert not set(LISTS[one]) & set(LISTS[other]), (one, other)
    assert [len(set(each)) for each in LISTS.values()] == [8, 8, 20, 8, 8, 8]


def test_there_are_twenty_verbs_and_fifty_six_variants() -> None:
    assert len({verb.name for verb in VERBS}) == len(VERBS) == 20
    assert len({(verb.name, bug.line, bug.text) for verb, bug in VARIANTS}) == len(VARIANTS) == 56
    assert all(1 <= len(verb.body) <= 4 for verb in VERBS)


def test_the_table_has_each_class_about_as_often_as_tasks_do() -> None:
    counts = Counter(bug.kind for _, bug in VARIANTS)
    assert set(counts) == set(BugClass)
    assert sum(FREQUENCIES.values()) == pytest.approx(1)
    for kind, share in FREQUENCIES.items():
        assert counts[kind] / len(VARIANTS) == pytest.approx(share, abs=0.011)


@pytest.mark.parametrize(
    "variant", VARIANTS, ids=lambda v: f"{v.verb.name}-{v.bug.line}-{v.bug.kind}"
)
def test_every_mistake_is_unique_text_that_visible_and_hidden_tests_see(variant: Variant) -> None:
    verb, bug = variant
    random = Random(7)
    for _ in range(20):
        names = {
            "a": random.choice(words.FIRST_PARAMETERS),
            "b": random.choice(words.SECOND_PARAMETERS),
            "xs": random.choice(words.LISTS),
        }
        function = Function(package="shop", module="core", verb=verb, noun="price", names=names)
        known = cases.draw(random, function)
        wrong = function.source(bug)
        assert wrong.count(function.text(bug.text).strip()) == 1
        assert not cases.passes(wrong, function.name, known.visible)
        assert not cases.passes(wrong, function.name, known.hidden)
        assert cases.passes(function.source(), function.name, (*known.visible, *known.hidden))
